// The CPU: a block is one thread, so loops over a block's threads are plain loops (which the compiler turns into vector
// instructions), barriers and shuffles vanish, and OpenMP shares the blocks out. See port.h.
#pragma once

#include <math.h>
#include <string.h>

#define PORT_ONE_THREAD 1
#define PORT_BOTH static inline
#define PORT_DEVICE static inline __attribute__((always_inline))
#define PORT_METHOD inline __attribute__((always_inline))
#define PORT_KERNEL(name, ...) static void name([[maybe_unused]] const int64_t port_block, __VA_ARGS__)
#define PORT_OWNER_KERNEL PORT_KERNEL
#define PORT_BLOCK port_block
#define PORT_THREAD ((int64_t)0)
#define PORT_THREADS ((int64_t)1)
#define PORT_WAVE 1
#define PORT_SHARED(type, name, count) alignas(64) type name[count]
#define PORT_BARRIER() ((void)0)
#define PORT_ALIGNED(p, alignment) ((void)0)
#define PORT_UNROLL

// Blocks of a grid over independent rows or elements: enough to share out evenly, few enough to cost nothing. It does
// not depend on the number of threads, so results do not either.
#define PORT_GRID 64
// The least elements that are worth a block of their own, a multiple of 16.
#define PORT_LEAST_CHUNK 4096

PORT_DEVICE void port_raise(float *flag) {
  const uint32_t one = 0x3f800000u;
  __atomic_store_n((uint32_t *)flag, one, __ATOMIC_RELAXED);
}

static inline int port_block_size(int) { return 1; }

// On the CPU `stream` is the number of threads to use.
template <class... P, class... A>
static int port_launch(void *stream, int64_t blocks, int, void (*kernel)(int64_t, P...), A... arguments) {
  const int threads = (int)(intptr_t)stream;
  if (threads <= 1 || blocks <= 1) {
    for (int64_t block = 0; block < blocks; ++block) kernel(block, (P)arguments...);
    return 0;
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t block = 0; block < blocks; ++block) kernel(block, (P)arguments...);
  return 0;
}
