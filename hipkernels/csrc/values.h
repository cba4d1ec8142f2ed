// Loops over the elements of a row. They run through lanes_each, lanes_sum and lanes_max: on a GPU the threads of a block
// take turns, on the CPU they are vector loops.
#pragma once

#include "packs.h"

// Calls f(i) for the first element i of every pack in [begin, end) that is this thread's.
template <int V, class F>
PORT_DEVICE void lanes_each(int64_t begin, int64_t end, F f) {
#if PORT_ONE_THREAD
  if constexpr (V > 1) {
    for (int64_t i = begin; i < end; i += V) f(i);
  } else {
#pragma omp simd
    for (int64_t i = begin; i < end; i += V) f(i);
  }
#else
  for (int64_t i = begin + PORT_THREAD * V; i < end; i += PORT_THREADS * V) f(i);
#endif
}

// Sums and maxima on the CPU go into this many running ones, since one alone would wait for itself; a multiple of every
// vector's length.
#define LANES_RUNNING 64

template <class T>
struct TwoOf {
  T a, b;
};
typedef TwoOf<float> Two;
template <class T>
PORT_DEVICE TwoOf<T> operator+(const TwoOf<T> &x, const TwoOf<T> &y) {
  return TwoOf<T>{x.a + y.a, x.b + y.b};
}
template <class T>
PORT_DEVICE Two total(const TwoOf<T> &x) {
  return Two{total(x.a), total(x.b)};
}

// What sums add up of a pack: its total, or on the CPU the pack itself, whose total is taken once.
template <class L>
PORT_DEVICE auto addend(const L &x) {
#if PORT_ONE_THREAD
  return x;
#else
  return total(x);
#endif
}
template <class L>
PORT_DEVICE auto addends(const L &a, const L &b) {
  return TwoOf<decltype(addend(a))>{addend(a), addend(b)};
}

#if PORT_ONE_THREAD
// The sum of f(i), which are packs or two packs each.
template <int V, class F>
PORT_DEVICE auto packs_sum(int64_t begin, int64_t end, F f) {
  constexpr int running = LANES_RUNNING / V;
  decltype(f(begin)) sums[running] = {};
  for (; begin + LANES_RUNNING <= end; begin += LANES_RUNNING) {
#pragma GCC unroll 16
    for (int k = 0; k < running; ++k) sums[k] = sums[k] + f(begin + k * V);
  }
  for (; begin < end; begin += V) sums[0] = sums[0] + f(begin);
  for (int k = 1; k < running; ++k) sums[0] = sums[0] + sums[k];
  return total(sums[0]);
}
#endif

// This thread's sum of f(i), the addend of a pack.
template <int V, class F>
PORT_DEVICE float lanes_sum(int64_t begin, int64_t end, F f) {
#if PORT_ONE_THREAD
  if constexpr (V > 1) {
    return packs_sum<V>(begin, end, f);
  } else {
    float sum = 0.0f;
    alignas(64) float sums[LANES_RUNNING] = {};
    for (; begin + LANES_RUNNING <= end; begin += LANES_RUNNING) {
#pragma omp simd
      for (int k = 0; k < LANES_RUNNING; ++k) sums[k] += f(begin + k);
    }
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) sum += f(i);
#pragma omp simd reduction(+ : sum)
    for (int k = 0; k < LANES_RUNNING; ++k) sum += sums[k];
    return sum;
  }
#else
  float sum = 0.0f;
  for (int64_t i = begin + PORT_THREAD * V; i < end; i += PORT_THREADS * V) sum += f(i);
  return sum;
#endif
}

// This thread's sum of f(i), the addends of two packs.
template <int V, class F>
PORT_DEVICE Two lanes_sum_two(int64_t begin, int64_t end, F f) {
#if PORT_ONE_THREAD
  if constexpr (V > 1) {
    return packs_sum<V>(begin, end, f);
  } else {
    float a = 0.0f, b = 0.0f;
    alignas(64) float as[LANES_RUNNING] = {}, bs[LANES_RUNNING] = {};
    for (; begin + LANES_RUNNING <= end; begin += LANES_RUNNING) {
#pragma omp simd
      for (int k = 0; k < LANES_RUNNING; ++k) {
        const Two two = f(begin + k);
        as[k] += two.a;
        bs[k] += two.b;
      }
    }
#pragma omp simd reduction(+ : a, b)
    for (int64_t i = begin; i < end; ++i) {
      const Two two = f(i);
      a += two.a;
      b += two.b;
    }
#pragma omp simd reduction(+ : a, b)
    for (int k = 0; k < LANES_RUNNING; ++k) {
      a += as[k];
      b += bs[k];
    }
    return Two{a, b};
  }
#else
  Two sum = {0.0f, 0.0f};
  for (int64_t i = begin + PORT_THREAD * V; i < end; i += PORT_THREADS * V) sum = sum + f(i);
  return sum;
#endif
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
// row of the workspace on the CPU. T is the storage type whose packs are added.
template <class T, int V>
struct Owned {
#if PORT_ONE_THREAD
  float *sums;
  PORT_METHOD Owned(float *memory, int64_t columns) : sums(memory) {
    for (int64_t i = 0; i < columns; ++i) sums[i] = 0.0f;
  }
  PORT_METHOD void add(int, int64_t i, const Lanes<V> &x) { store(sums + i, load<V>(sums + i) + x); }
  PORT_METHOD void write(int64_t columns) { order_elements<T, V>(sums, columns); }
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
  lanes_each<V>(0, columns, [&](int64_t i) { f(0, i); });
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

// Host side: what limits packs, the columns of a row and the alignment of pointers. On the CPU columns alone do, so that
// results do not depend on where a tensor lies.
struct Width {
  bool aligned = true;
  int64_t columns;
  explicit Width(int64_t c) : columns(c) {}
  Width &pointer(const void *p) {
    aligned = aligned && (PORT_ONE_THREAD || (uintptr_t)p % 16 == 0);
    return *this;
  }
};
template <int V>
struct Size {
  static constexpr int value = V;
};

// Calls f with this many lanes a pack if every row can be cut into such packs, else with one.
template <int WIDEST, class F>
static int with_lanes(const Width &width, F f) {
  if constexpr (WIDEST > 1) {
    if (width.aligned && width.columns % WIDEST == 0) return f(Size<WIDEST>{});
  }
  return f(Size<1>{});
}
template <class T, class F>
static int with_width(const Width &width, F f) {
  return with_lanes<Widest<T>::lanes>(width, f);
}
template <class T, class F>
static int with_arithmetic_width(const Width &width, F f) {
  return with_lanes<WidestArithmetic<T>::lanes>(width, f);
}
