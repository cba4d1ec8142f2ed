// The CPU: a block is one thread, so loops over a block's threads are plain loops (which the compiler turns into vector
// instructions), barriers and shuffles vanish, and OpenMP shares the blocks out. See port.h.
#pragma once

#include <math.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PORT_ONE_THREAD 1
#define PORT_BOTH static inline
#define PORT_DEVICE static inline __attribute__((always_inline))
#define PORT_METHOD inline __attribute__((always_inline))
// Flat, so that loops see through the closures that they are given.
#define PORT_KERNEL(name, ...) \
  static __attribute__((flatten)) void name([[maybe_unused]] const int64_t port_block, __VA_ARGS__)
#define PORT_OWNER_KERNEL PORT_KERNEL
#define PORT_BLOCK port_block
#define PORT_THREAD ((int64_t)0)
#define PORT_THREADS ((int64_t)1)
#define PORT_WAVE 1
#define PORT_SHARED(type, name, count) alignas(64) type name[count]
#define PORT_BARRIER() ((void)0)
#define PORT_ALIGNED(p, alignment) ((void)0)
#define PORT_UNROLL
#define PORT_PREFETCH(p) __builtin_prefetch(p)

// Blocks of a grid over independent rows or elements: enough to share out evenly, few enough to cost nothing. It does
// not depend on the number of threads, so results do not either.
#define PORT_GRID 64
// The least elements that are worth a block of their own, a multiple of 16.
#define PORT_LEAST_CHUNK 4096

PORT_DEVICE void port_raise(float *flag) {
  const uint32_t one = 0x3f800000u;
  __atomic_store_n((uint32_t *)flag, one, __ATOMIC_RELAXED);
}

// The CPU's vectors.
#pragma GCC diagnostic ignored "-Wpsabi"
#if defined(__AVX512F__)
#define PORT_FLOATS 16
#elif defined(__AVX__)
#define PORT_FLOATS 8
#else
#define PORT_FLOATS 4
#endif
typedef float port_floats __attribute__((vector_size(4 * PORT_FLOATS)));
typedef uint32_t port_words __attribute__((vector_size(4 * PORT_FLOATS)));

// Vectors of half to and from float, if the CPU has instructions for it.
#if defined(__AVX512F__)
#define PORT_HALF_VECTORS 1
PORT_DEVICE port_floats port_widen_half(const void *p) {
  return (port_floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i *)p));
}
PORT_DEVICE void port_narrow_half(void *p, port_floats x) {
  _mm256_storeu_si256((__m256i *)p, _mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__F16C__)
#define PORT_HALF_VECTORS 1
PORT_DEVICE port_floats port_widen_half(const void *p) {
  return (port_floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
PORT_DEVICE void port_narrow_half(void *p, port_floats x) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
#define PORT_HALF_VECTORS 0
#endif

// Pairs of bfloat16 by the CPU's instruction, which takes subnormal numbers for zero: where there is one, false.
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define PORT_BF16_VECTORS 1
PORT_DEVICE bool port_narrow_normal(port_floats even, port_floats odd, port_words *pairs) {
  const int subnormal = 0x20;
  if (_mm512_fpclass_ps_mask((__m512)even, subnormal) | _mm512_fpclass_ps_mask((__m512)odd, subnormal)) return false;
  const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even), alternate = {
    0x0011000100100000, 0x0013000300120002, 0x0015000500140004, 0x0017000700160006,
    0x0019000900180008, 0x001b000b001a000a, 0x001d000d001c000c, 0x001f000f001e000e};
  *pairs = (port_words)_mm512_maskz_permutexvar_epi16(0xffffffffu, alternate, apart);
  return true;
}
#else
#define PORT_BF16_VECTORS 0
#endif

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
