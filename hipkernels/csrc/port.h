// One kernel source, four ways to compile it. The mode is chosen by the compiler (AMD, NVIDIA) or by a macro:
//
//   AMD            hipcc or clang -x hip      blocks of up to 1024 threads, waves of 64 (or 32 on RDNA)
//   NVIDIA         nvcc -x cu                 blocks of up to 1024 threads, waves of 32
//   CPU            g++ -DPORT_CPU             one thread a block and one lane a wave; OpenMP over the grid
//   emulated       g++ -DPORT_EMULATED        real blocks of fibers, waves of 64 or 32; for tests
//
// What a kernel may use (and nothing else of any vendor's):
//
//   PORT_KERNEL(name, arguments...)   declares a kernel; templates are allowed
//   PORT_OWNER_KERNEL(name, ...)      one whose threads own columns (see Owned in values.h)
//   PORT_BLOCK                        this block's number, int64_t
//   PORT_THREAD, PORT_THREADS         this thread's number in its block, and how many there are
//   PORT_WAVE                         lanes a wave
//   PORT_SHARED(type, name, count)    memory of the block (LDS)
//   PORT_PREFETCH(pointer)            this memory will be read soon
//   PORT_BARRIER()                    every thread of the block gets here, or none
//   port_shuffle_xor(value, mask)     the value of lane (lane ^ mask); every lane of the wave gets here, or none
//   PORT_ALIGNED(p, alignment)        p is a multiple of alignment, or the emulator says so
//   port_raise(flag)                  sets a float in memory to 1, from any number of threads at once
//   port_launch(...)                  host side: runs a kernel, returns 0 or PORT_FAILED + the runtime's code
#pragma once

#include <stddef.h>
#include <stdint.h>

// The most threads of a block that owns columns, and the columns that each may hold in registers.
#define PORT_OWNERS 512
#define PORT_VALUES 16

#if defined(__HIPCC__) || defined(__HIP__) || defined(__CUDACC__)
#define PORT_GPU 1
#include "port_gpu.h"
#elif defined(PORT_EMULATED)
#include "port_emulated.h"
#elif defined(PORT_CPU)
#include "port_cpu.h"
#else
#error "compile with hipcc, nvcc, or g++ -DPORT_CPU or g++ -DPORT_EMULATED"
#endif

extern "C" {
#include "kernels.h"
}

// What launchers return beside 0.
enum {
  PORT_BAD_DTYPE = 1,   // no such dtype, or not for this argument
  PORT_BAD_SIZE = 2,    // a negative or impossible size
  PORT_TOO_WIDE = 3,    // rows are longer than the threads of a block can own
  PORT_NO_MEMORY = 4,   // of the host
  PORT_FAILED = 100,    // plus the code of the device's runtime
};

PORT_BOTH int64_t port_smaller(int64_t a, int64_t b) { return a < b ? a : b; }
PORT_BOTH int64_t port_larger(int64_t a, int64_t b) { return a > b ? a : b; }
PORT_BOTH int64_t port_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A range cut into contiguous chunks, one a block.
struct PortSplit {
  int64_t blocks, each;
};

static inline PortSplit port_split(int64_t items, int64_t blocks) {
  PortSplit split;
  split.each = port_larger(1, port_ceil(items, port_larger(1, blocks)));
  split.blocks = port_ceil(items, split.each);
  return split;
}

// Threads of a block whose threads take `items` steps together.
static inline int port_threads(int64_t items) {
  int threads = 64;
  while (threads < items && threads < 256) threads *= 2;
  return port_block_size(threads);
}

// Threads of a block whose threads own `columns` between them, PORT_VALUES each; 0: not even PORT_OWNERS suffice.
static inline int port_owners(int64_t columns) {
#if PORT_ONE_THREAD
  (void)columns;
  return 1;
#else
  int threads = port_threads(columns / 8);
  while ((int64_t)threads * PORT_VALUES < columns && threads < PORT_OWNERS) threads *= 2;
  return (int64_t)threads * PORT_VALUES < columns ? 0 : threads;
#endif
}

// A flat range cut into contiguous chunks, one a block; chunks start at multiples of 16 elements.
struct Chunks {
  int64_t blocks, each;
  int threads;
};

static inline Chunks chunks_of(int64_t n) {
  const PortSplit split = port_split(port_ceil(n, PORT_LEAST_CHUNK), PORT_GRID);
  return Chunks{split.blocks, split.each * PORT_LEAST_CHUNK, port_threads(256)};
}
