// A GPU's blocks on the CPU, for tests: every thread of a block is a fiber, blocks run one after another.
//
// A fiber runs until it waits at a barrier or in a shuffle. Which fiber runs next is a choice of the test: the lowest,
// the highest, or a random one that can. Memory of the block holds NaN when a block starts. A barrier that some
// threads never reach, two barriers that wait for each other and a shuffle without all lanes end the launch with
// PORT_FAULT, and so does a pack at an address that no GPU would read it from; `port_emulator.fault` says where. Under ThreadSanitizer only barriers order the memory accesses of
// different threads, so it reports races between threads of a block. One launch at a time.
#pragma once

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define PORT_ONE_THREAD 0
#define PORT_BOTH static inline
#define PORT_DEVICE static inline
#define PORT_METHOD inline
#define PORT_KERNEL(name, ...) static void name(__VA_ARGS__)
#define PORT_OWNER_KERNEL PORT_KERNEL
#define PORT_BLOCK ((int64_t)port_emulator.block)
#define PORT_THREAD ((int64_t)port_emulated_thread())
#define PORT_THREADS ((int64_t)port_emulator.count)
#define PORT_WAVE (port_emulator.wave)
#define PORT_SHARED(type, name, count) \
  static type name[count];             \
  static const PortShared name##_registered(name, sizeof(name))
#define PORT_BARRIER() port_emulated_wait(PORT_AT_BARRIER, __FILE__, __LINE__)
#define PORT_ALIGNED(p, alignment) \
  if ((uintptr_t)(p) % (alignment)) port_emulated_wait(PORT_MISALIGNED, __FILE__, __LINE__)
#define PORT_UNROLL
#define PORT_PREFETCH(p) ((void)(p))
#define PORT_GRID 5
// The least elements that are worth a block of their own, a multiple of 16.
#define PORT_LEAST_CHUNK 304
#define PORT_FAULT 90

#if defined(__SANITIZE_THREAD__)
#define PORT_UNSEEN __attribute__((noinline, no_sanitize("thread")))
extern "C" {
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void *__tsan_get_current_fiber(void);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
}
#define PORT_NO_SYNC 1
#else
#define PORT_UNSEEN __attribute__((noinline))
#define __tsan_create_fiber(flags) nullptr
#define __tsan_switch_to_fiber(fiber, flags) ((void)0)
#define __tsan_get_current_fiber() nullptr
#define __tsan_acquire(address) ((void)0)
#define __tsan_release(address) ((void)0)
#endif

enum PortState { PORT_READY, PORT_AT_BARRIER, PORT_AT_SHUFFLE, PORT_DONE, PORT_MISALIGNED };
enum PortOrder { PORT_LOWEST_FIRST, PORT_HIGHEST_FIRST, PORT_RANDOM };

struct PortFiber {
  ucontext_t context;
  char *stack;
  void *tsan;
  PortState state;
  const char *file;
  int line, mask;
  double value;
};

struct PortEmulator {
  int wave = 64, threads = 0, order = PORT_LOWEST_FIRST;
  uint64_t seed = 1;
  int64_t block = 0;
  int count = 0, current = 0;
  PortFiber fibers[1024] = {};
  ucontext_t scheduler;
  void *tsan = nullptr;
  void (*body)(void *) = nullptr;
  void *closure = nullptr;
  char fault[512] = {};
  char start = 0, finish = 0, barrier = 0;
  void *shared[64] = {};
  size_t shared_bytes[64] = {};
  int shared_count = 0;
};
inline PortEmulator port_emulator;

struct PortShared {
  PORT_UNSEEN PortShared(void *memory, size_t bytes) {
    PortEmulator &e = port_emulator;
    if (e.shared_count == 64) abort();
    memset(memory, 0xff, bytes);
    e.shared[e.shared_count] = memory;
    e.shared_bytes[e.shared_count++] = bytes;
  }
};

PORT_UNSEEN inline int port_emulated_thread() { return port_emulator.current; }

// The fiber stops here until the scheduler lets it go on.
PORT_UNSEEN inline double port_emulated_wait(PortState state, const char *file, int line, double value = 0, int mask = 0) {
  PortEmulator &e = port_emulator;
  PortFiber &fiber = e.fibers[e.current];
  fiber.state = state;
  fiber.file = file;
  fiber.line = line;
  fiber.value = value;
  fiber.mask = mask;
  if (state == PORT_AT_BARRIER) __tsan_release(&e.barrier);
  __tsan_switch_to_fiber(e.tsan, PORT_NO_SYNC);
  swapcontext(&fiber.context, &e.scheduler);
  if (state == PORT_AT_BARRIER) __tsan_acquire(&e.barrier);
  return fiber.value;
}

template <class T>
static T port_shuffle_xor(T value, int mask, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
  return (T)port_emulated_wait(PORT_AT_SHUFFLE, file, line, (double)value, mask);
}

static inline void port_raise(float *flag) { *flag = 1.0f; }

PORT_UNSEEN inline void port_emulated_enter() {
  PortEmulator &e = port_emulator;
  __tsan_acquire(&e.start);
  e.body(e.closure);
  __tsan_release(&e.finish);
  e.fibers[e.current].state = PORT_DONE;
  __tsan_switch_to_fiber(e.tsan, PORT_NO_SYNC);
  setcontext(&e.scheduler);
}

PORT_UNSEEN inline void port_emulated_prepare() {
  PortEmulator &e = port_emulator;
  const size_t size = 256 * 1024;
  for (int i = 0; i < e.shared_count; ++i) memset(e.shared[i], 0xff, e.shared_bytes[i]);
  for (int t = 0; t < e.count; ++t) {
    PortFiber &fiber = e.fibers[t];
    if (!fiber.stack) {
      fiber.stack = (char *)malloc(size);
      fiber.tsan = __tsan_create_fiber(0);
    }
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = size;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, port_emulated_enter, 0);
    fiber.state = PORT_READY;
  }
  e.tsan = __tsan_get_current_fiber();
  __tsan_release(&e.start);
}

// The next fiber that can run, by the order asked for; -1: none can.
PORT_UNSEEN inline int port_emulated_next() {
  PortEmulator &e = port_emulator;
  int first = 0, step = 1;
  if (e.order == PORT_HIGHEST_FIRST) first = e.count - 1, step = e.count - 1;
  if (e.order == PORT_RANDOM) {
    e.seed = e.seed * 6364136223846793005u + 1442695040888963407u;
    first = (int)((e.seed >> 33) % (uint64_t)e.count);
  }
  for (int n = 0, t = first; n < e.count; ++n, t = (t + step) % e.count)
    if (e.fibers[t].state == PORT_READY) return t;
  return -1;
}

// Whether fibers [begin, end) all wait in this state at one place.
PORT_UNSEEN inline bool port_emulated_together(int begin, int end, PortState state) {
  const PortFiber *f = port_emulator.fibers;
  for (int t = begin; t < end; ++t)
    if (f[t].state != state || f[t].line != f[begin].line || strcmp(f[t].file, f[begin].file) != 0) return false;
  return true;
}

PORT_UNSEEN inline void port_emulated_shuffle(int thread) {
  PortEmulator &e = port_emulator;
  const int begin = thread / e.wave * e.wave;
  if (begin + e.wave > e.count || !port_emulated_together(begin, begin + e.wave, PORT_AT_SHUFFLE)) return;
  double values[64];
  for (int lane = 0; lane < e.wave; ++lane) values[lane] = e.fibers[begin + lane].value;
  for (int lane = 0; lane < e.wave; ++lane) {
    PortFiber &fiber = e.fibers[begin + lane];
    const int from = lane ^ fiber.mask;
    fiber.value = from < e.wave ? values[from] : nan("");
    fiber.state = PORT_READY;
  }
}

// How many threads wait where thread t does.
PORT_UNSEEN inline int port_emulated_company(int t) {
  const PortEmulator &e = port_emulator;
  int company = 0;
  for (int other = 0; other < e.count; ++other) {
    const PortFiber &a = e.fibers[t], &b = e.fibers[other];
    company += a.state == b.state && (a.state == PORT_DONE || (a.line == b.line && strcmp(a.file, b.file) == 0));
  }
  return company;
}

// Describe a thread at a misaligned address, else the loneliest waiting one.
PORT_UNSEEN inline int port_emulated_fault() {
  PortEmulator &e = port_emulator;
  int counts[5] = {}, culprit = -1;
  for (int t = 0; t < e.count; ++t) {
    ++counts[e.fibers[t].state];
    if (e.fibers[t].state == PORT_DONE) continue;
    if (e.fibers[t].state == PORT_MISALIGNED) {
      snprintf(e.fault, sizeof(e.fault), "%s:%d: misaligned pack: in thread %d of block %ld", e.fibers[t].file,
               e.fibers[t].line, t, (long)e.block);
      return PORT_FAULT;
    }
    if (culprit < 0 || port_emulated_company(t) < port_emulated_company(culprit)) culprit = t;
  }
  const PortFiber &fiber = e.fibers[culprit];
  snprintf(e.fault, sizeof(e.fault),
           "%s:%d: %s: %d of %d threads of block %ld are there; in all, %d wait in shuffles, %d at barriers, %d have "
           "finished",
           fiber.file, fiber.line, fiber.state == PORT_AT_SHUFFLE ? "incomplete shuffle" : "divergent barrier",
           port_emulated_company(culprit), e.count, (long)e.block, counts[PORT_AT_SHUFFLE], counts[PORT_AT_BARRIER],
           counts[PORT_DONE]);
  return PORT_FAULT;
}

PORT_UNSEEN inline int port_emulated_block() {
  PortEmulator &e = port_emulator;
  port_emulated_prepare();
  for (;;) {
    const int thread = port_emulated_next();
    if (thread >= 0) {
      e.current = thread;
      __tsan_switch_to_fiber(e.fibers[thread].tsan, PORT_NO_SYNC);
      swapcontext(&e.scheduler, &e.fibers[thread].context);
      if (e.fibers[thread].state == PORT_AT_SHUFFLE) port_emulated_shuffle(thread);
    } else if (port_emulated_together(0, e.count, PORT_AT_BARRIER)) {
      for (int t = 0; t < e.count; ++t) e.fibers[t].state = PORT_READY;
    } else {
      for (int t = 0; t < e.count; ++t)
        if (e.fibers[t].state != PORT_DONE) return port_emulated_fault();
      __tsan_acquire(&e.finish);
      return 0;
    }
  }
}

static inline int port_block_size(int threads) { return port_emulator.threads ? port_emulator.threads : threads; }

template <class... P, class... A>
static int port_launch(void *, int64_t blocks, int threads, void (*kernel)(P...), A... arguments) {
  auto body = [=] { kernel((P)arguments...); };
  PortEmulator &e = port_emulator;
  e.body = [](void *closure) { (*static_cast<decltype(body) *>(closure))(); };
  e.closure = &body;
  e.count = threads;
  for (int64_t block = 0; block < blocks; ++block) {
    e.block = block;
    if (int code = port_emulated_block()) return code;
  }
  return 0;
}
