// Storage types and packs of neighbouring elements.
//
// Arithmetic is in float. Memory holds float, bfloat16 or half. A thread works on packs of V neighbouring elements, so
// that a GPU moves 16 bytes an instruction; `Lanes<V>` is the pack, and Lanes<1> is plain float, which is all the CPU
// mode ever uses. Loops over a row run through lanes_each, lanes_sum and lanes_max: on a GPU the threads of a block take
// turns, on the CPU they are vector loops.
#pragma once

#include "port.h"

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

PORT_DEVICE uint32_t bits_of(float x) {
#if defined(__CUDACC__)
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}

PORT_DEVICE float float_of(uint32_t bits) {
#if defined(__CUDACC__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

PORT_DEVICE float widen(float x) { return x; }
PORT_DEVICE float widen(bf16 x) { return float_of((uint32_t)x.bits << 16); }

PORT_DEVICE void narrow(float x, float &out) { out = x; }

// Round to nearest even; NaN stays NaN.
PORT_DEVICE void narrow(float x, bf16 &out) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out.bits = (uint16_t)(x != x ? 0x7fc0u : rounded);
}

#if defined(__CUDACC__)
PORT_DEVICE float widen(fp16 x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
PORT_DEVICE void narrow(float x, fp16 &out) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x)); }
#elif PORT_GPU
PORT_DEVICE float widen(fp16 x) { return (float)__builtin_bit_cast(_Float16, x.bits); }
PORT_DEVICE void narrow(float x, fp16 &out) { out.bits = __builtin_bit_cast(uint16_t, (_Float16)x); }
#else
// In integer arithmetic and without branches, so that loops with it become vector loops on every CPU.
PORT_DEVICE float widen(fp16 x) {
  const uint32_t magnitude = (uint32_t)(x.bits & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & 0x0f800000u;
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t special = magnitude + (224u << 23);
  const float subnormal = float_of(magnitude + (113u << 23)) - float_of(113u << 23);
  const uint32_t wide = exponent == 0x0f800000u ? special : exponent == 0 ? bits_of(subnormal) : normal;
  return float_of(wide | (uint32_t)(x.bits & 0x8000u) << 16);
}
PORT_DEVICE void narrow(float x, fp16 &out) {
  const uint32_t bits = bits_of(x), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t half = magnitude >= 0x47800000u ? special : magnitude < 0x38800000u ? subnormal : normal;
  out.bits = (uint16_t)(half | sign >> 16);
}
#endif

template <int V>
struct Pack {
  float v[V];
};
template <int V>
struct LanesOf {
  typedef Pack<V> type;
};
template <>
struct LanesOf<1> {
  typedef float type;
};
template <int V>
using Lanes = typename LanesOf<V>::type;

// Widest pack of a storage type: 16 bytes.
template <class T>
struct Widest {
  static constexpr int lanes = PORT_ONE_THREAD ? 1 : (int)(16 / sizeof(T));
};

#define PORT_OPERATOR(op)                                                          \
  template <int V>                                                                 \
  PORT_DEVICE Pack<V> operator op(Pack<V> a, const Pack<V> &b) {                   \
    PORT_UNROLL for (int k = 0; k < V; ++k) a.v[k] = a.v[k] op b.v[k];             \
    return a;                                                                      \
  }                                                                                \
  template <int V>                                                                 \
  PORT_DEVICE Pack<V> operator op(Pack<V> a, float b) {                            \
    PORT_UNROLL for (int k = 0; k < V; ++k) a.v[k] = a.v[k] op b;                  \
    return a;                                                                      \
  }                                                                                \
  template <int V>                                                                 \
  PORT_DEVICE Pack<V> operator op(float a, Pack<V> b) {                            \
    PORT_UNROLL for (int k = 0; k < V; ++k) b.v[k] = a op b.v[k];                  \
    return b;                                                                      \
  }
PORT_OPERATOR(+)
PORT_OPERATOR(-)
PORT_OPERATOR(*)
#undef PORT_OPERATOR

// f on every lane.
template <class F>
PORT_DEVICE float map(float x, F f) {
  return f(x);
}
template <int V, class F>
PORT_DEVICE Pack<V> map(Pack<V> x, F f) {
  PORT_UNROLL for (int k = 0; k < V; ++k) x.v[k] = f(x.v[k]);
  return x;
}
template <class F>
PORT_DEVICE float map(float x, float y, F f) {
  return f(x, y);
}
template <int V, class F>
PORT_DEVICE Pack<V> map(Pack<V> x, const Pack<V> &y, F f) {
  PORT_UNROLL for (int k = 0; k < V; ++k) x.v[k] = f(x.v[k], y.v[k]);
  return x;
}

// f(x, k) on every lane, with the lane's number.
template <class F>
PORT_DEVICE float map_lane(float x, F f) {
  return f(x, 0);
}
template <int V, class F>
PORT_DEVICE Pack<V> map_lane(Pack<V> x, F f) {
  PORT_UNROLL for (int k = 0; k < V; ++k) x.v[k] = f(x.v[k], k);
  return x;
}

PORT_DEVICE float total(float x) { return x; }
template <int V>
PORT_DEVICE float total(const Pack<V> &x) {
  float sum = x.v[0];
  PORT_UNROLL for (int k = 1; k < V; ++k) sum += x.v[k];
  return sum;
}
PORT_DEVICE float largest(float x) { return x; }
template <int V>
PORT_DEVICE float largest(const Pack<V> &x) {
  float most = x.v[0];
  PORT_UNROLL for (int k = 1; k < V; ++k) most = x.v[k] > most ? x.v[k] : most;
  return most;
}

template <class T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Stored {
  T v[V];
};

// V neighbours at p, which is aligned to them (or to 16 bytes).
template <int V, class T>
PORT_DEVICE Lanes<V> load(const T *p) {
  if constexpr (V == 1) {
    return widen(*p);
  } else {
    PORT_ALIGNED(p, alignof(Stored<T, V>));
    const Stored<T, V> stored = *reinterpret_cast<const Stored<T, V> *>(p);
    Pack<V> pack;
    PORT_UNROLL for (int k = 0; k < V; ++k) pack.v[k] = widen(stored.v[k]);
    return pack;
  }
}

// x as it will be after it has been stored.
template <class T>
PORT_DEVICE float rounded(float x) {
  T stored;
  narrow(x, stored);
  return widen(stored);
}
template <class T, int V>
PORT_DEVICE Pack<V> rounded(Pack<V> x) {
  PORT_UNROLL for (int k = 0; k < V; ++k) x.v[k] = rounded<T>(x.v[k]);
  return x;
}

template <class T>
PORT_DEVICE void store(T *p, float x) {
  narrow(x, *p);
}
template <class T, int V>
PORT_DEVICE void store(T *p, const Pack<V> &x) {
  PORT_ALIGNED(p, alignof(Stored<T, V>));
  Stored<T, V> stored;
  PORT_UNROLL for (int k = 0; k < V; ++k) narrow(x.v[k], stored.v[k]);
  *reinterpret_cast<Stored<T, V> *>(p) = stored;
}

// Calls f(i) for the first element i of every pack in [begin, end) that is this thread's.
template <int V, class F>
PORT_DEVICE void lanes_each(int64_t begin, int64_t end, F f) {
#if PORT_ONE_THREAD
#pragma omp simd
  for (int64_t i = begin; i < end; i += V) f(i);
#else
  for (int64_t i = begin + PORT_THREAD * V; i < end; i += PORT_THREADS * V) f(i);
#endif
}

// Sums and maxima on the CPU go into this many running ones, since one alone would wait for itself; a multiple of every
// vector's length.
#define LANES_RUNNING 64

// This thread's sum of f(i), a float.
template <int V, class F>
PORT_DEVICE float lanes_sum(int64_t begin, int64_t end, F f) {
  float sum = 0.0f;
#if PORT_ONE_THREAD
  alignas(64) float sums[LANES_RUNNING] = {};
  for (; begin + LANES_RUNNING * V <= end; begin += LANES_RUNNING * V) {
#pragma omp simd
    for (int k = 0; k < LANES_RUNNING; ++k) sums[k] += f(begin + k * V);
  }
#pragma omp simd reduction(+ : sum)
  for (int64_t i = begin; i < end; i += V) sum += f(i);
#pragma omp simd reduction(+ : sum)
  for (int k = 0; k < LANES_RUNNING; ++k) sum += sums[k];
#else
  for (int64_t i = begin + PORT_THREAD * V; i < end; i += PORT_THREADS * V) sum += f(i);
#endif
  return sum;
}

struct Two {
  float a, b;
};
PORT_DEVICE Two operator+(Two x, Two y) { return Two{x.a + y.a, x.b + y.b}; }

// This thread's sum of f(i), two floats.
template <int V, class F>
PORT_DEVICE Two lanes_sum_two(int64_t begin, int64_t end, F f) {
  float a = 0.0f, b = 0.0f;
#if PORT_ONE_THREAD
  alignas(64) float as[LANES_RUNNING] = {}, bs[LANES_RUNNING] = {};
  for (; begin + LANES_RUNNING * V <= end; begin += LANES_RUNNING * V) {
#pragma omp simd
    for (int k = 0; k < LANES_RUNNING; ++k) {
      const Two two = f(begin + k * V);
      as[k] += two.a;
      bs[k] += two.b;
    }
  }
#pragma omp simd reduction(+ : a, b)
  for (int64_t i = begin; i < end; i += V) {
    const Two two = f(i);
    a += two.a;
    b += two.b;
  }
#pragma omp simd reduction(+ : a, b)
  for (int k = 0; k < LANES_RUNNING; ++k) {
    a += as[k];
    b += bs[k];
  }
#else
  for (int64_t i = begin + PORT_THREAD * V; i < end; i += PORT_THREADS * V) {
    const Two two = f(i);
    a += two.a;
    b += two.b;
  }
#endif
  return Two{a, b};
}

#define PORT_LOWEST (-__builtin_inff())

// This thread's largest f(i), a float; minus infinity for none.
template <int V, class F>
PORT_DEVICE float lanes_max(int64_t begin, int64_t end, F f) {
  float most = PORT_LOWEST;
#if PORT_ONE_THREAD
#pragma omp simd reduction(max : most)
  for (int64_t i = begin; i < end; i += V) {
    const float x = f(i);
    most = x > most ? x : most;
  }
#else
  for (int64_t i = begin + PORT_THREAD * V; i < end; i += PORT_THREADS * V) {
    const float x = f(i);
    most = x > most ? x : most;
  }
#endif
  return most;
}

// Sums over rows for columns that a thread owns while its block goes through its rows: registers on a GPU, the block's
// row of the workspace on the CPU.
template <int V>
struct Owned {
#if PORT_ONE_THREAD
  float *sums;
  PORT_METHOD Owned(float *memory, int64_t columns) : sums(memory) {
    for (int64_t i = 0; i < columns; ++i) sums[i] = 0.0f;
  }
  PORT_METHOD void add(int, int64_t i, float x) { sums[i] += x; }
  PORT_METHOD void write(int64_t) {}
#else
  static constexpr int packs = PORT_VALUES / V;
  float *memory;
  Lanes<V> sums[packs];
  PORT_METHOD Owned(float *workspace, int64_t) : memory(workspace) {
    PORT_UNROLL for (int k = 0; k < packs; ++k) sums[k] = Lanes<V>{};
  }
  PORT_METHOD void add(int k, int64_t, const Lanes<V> &x) { sums[k] = sums[k] + x; }
  PORT_METHOD void write(int64_t columns) {
    PORT_UNROLL for (int k = 0; k < packs; ++k) {
      const int64_t i = (PORT_THREAD + k * PORT_THREADS) * V;
      if (i < columns) store(memory + i, sums[k]);
    }
  }
#endif
};

// Calls f(k, i) for every pack of columns that this thread owns: its k-th, which starts at column i.
template <int V, class F>
PORT_DEVICE void owned_each(int64_t columns, F f) {
#if PORT_ONE_THREAD
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) f(0, i);
#else
  PORT_UNROLL for (int k = 0; k < PORT_VALUES / V; ++k) {
    const int64_t i = (PORT_THREAD + k * PORT_THREADS) * V;
    if (i < columns) f(k, i);
  }
#endif
}

// owned_each of f, and this thread's sum of what it returns, two floats.
template <int V, class F>
PORT_DEVICE Two owned_sum_two(int64_t columns, F f) {
#if PORT_ONE_THREAD
  return lanes_sum_two<V>(0, columns, [&](int64_t i) { return f(0, i); });
#else
  Two sum = {0.0f, 0.0f};
  owned_each<V>(columns, [&](int k, int64_t i) { sum = sum + f(k, i); });
  return sum;
#endif
}

// How many elements lanes_each of [begin, end) gives this thread.
template <int V>
PORT_DEVICE int64_t lanes_count(int64_t begin, int64_t end) {
#if PORT_ONE_THREAD
  return end - begin;
#else
  const int64_t left = end - begin - PORT_THREAD * V;
  return left <= 0 ? 0 : port_ceil(left, PORT_THREADS * V) * V;
#endif
}

// For rows much shorter than a block: calls f(row, columns_each) where columns_each(begin, end, g) calls g(i) for packs
// of these columns. On a GPU every thread has one pack of one row at a time, of the `columns` that all calls of
// columns_each together cover.
template <int V, class F>
PORT_DEVICE void rows_each(int64_t begin, int64_t end, int64_t columns, F f) {
#if PORT_ONE_THREAD
  (void)columns;
  for (int64_t row = begin; row < end; ++row)
    f(row, [&](int64_t first, int64_t last, auto g) { lanes_each<1>(first, last, g); });
#else
  const uint32_t packs = (uint32_t)(columns / V), count = (uint32_t)(end - begin) * packs;
  for (uint32_t item = (uint32_t)PORT_THREAD; item < count; item += (uint32_t)PORT_THREADS) {
    const int64_t i = (int64_t)(item % packs) * V;
    f(begin + item / packs, [&](int64_t first, int64_t last, auto g) {
      if (i >= first && i < last) g(i);
    });
  }
#endif
}

// Calls f with a type whose `value` is the condition, so that a loop inside has no branch.
struct Yes {
  static constexpr bool value = true;
};
struct No {
  static constexpr bool value = false;
};
template <class F>
PORT_DEVICE void choose(bool condition, F f) {
  if (condition)
    f(Yes{});
  else
    f(No{});
}

// Host side: calls f with the storage type of a dtype code.
template <class F>
static int with_dtype(int dtype, F f) {
  switch (dtype) {
    case PIPERT_FP32: return f(float{});
    case PIPERT_BF16: return f(bf16{});
    case PIPERT_FP16: return f(fp16{});
    default: return PORT_BAD_DTYPE;
  }
}

// Host side: calls f with the widest pack that every row of `columns` elements can be cut into, for pointers that are
// aligned to it.
struct Width {
  bool aligned = true;
  int64_t columns;
  explicit Width(int64_t c) : columns(c) {}
  Width &pointer(const void *p) {
    aligned = aligned && (uintptr_t)p % 16 == 0;
    return *this;
  }
};
template <int V>
struct Size {
  static constexpr int value = V;
};
template <class T, class F>
static int with_width(const Width &width, F f) {
  constexpr int widest = Widest<T>::lanes;
  if constexpr (widest > 1) {
    if (width.aligned && width.columns % widest == 0) return f(Size<widest>{});
  }
  return f(Size<1>{});
}
