// Packs of V neighbouring elements, on which a thread works at a time, so that a GPU moves 16 bytes an instruction:
// `Lanes<V>`, which for one is plain float. On the CPU most kernels know only that and leave the vector instructions to
// the compiler; those that do nothing but arithmetic take packs of two vectors (see packs_cpu.h).
#pragma once

#include "storage.h"

#if PORT_ONE_THREAD
#include "packs_cpu.h"
#else
// Widest pack of a storage type: 16 bytes.
template <class T>
struct Widest {
  static constexpr int lanes = (int)(16 / sizeof(T));
};
// Widest pack in kernels that do nothing with packs but arithmetic.
template <class T>
using WidestArithmetic = Widest<T>;

template <int V>
struct Pack {
  static constexpr int parts = V;
  float v[V];
};

template <int V>
PORT_DEVICE float total(const Pack<V> &x) {
  float sum = x.v[0];
  PORT_UNROLL for (int k = 1; k < V; ++k) sum += x.v[k];
  return sum;
}

template <class T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Stored {
  T v[V];
};
template <int V, class T>
PORT_DEVICE Pack<V> load_pack(const T *p) {
  PORT_ALIGNED(p, alignof(Stored<T, V>));
  const Stored<T, V> stored = *reinterpret_cast<const Stored<T, V> *>(p);
  Pack<V> pack;
  PORT_UNROLL for (int k = 0; k < V; ++k) pack.v[k] = widen(stored.v[k]);
  return pack;
}
template <class T, int V>
PORT_DEVICE Pack<V> store_pack(T *p, Pack<V> x) {
  PORT_ALIGNED(p, alignof(Stored<T, V>));
  Stored<T, V> stored;
  PORT_UNROLL for (int k = 0; k < V; ++k) {
    narrow(x.v[k], stored.v[k]);
    x.v[k] = widen(stored.v[k]);
  }
  *reinterpret_cast<Stored<T, V> *>(p) = stored;
  return x;
}

template <class T, int V>
PORT_DEVICE void order_elements(float *, int64_t) {}
template <class T, int V>
struct Columns {
  const float *p;
  static constexpr bool ok = true;
  Columns(const float *vector, int64_t) : p(vector) {}
};
#endif

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

#define PORT_OPERATOR(op)                                                          \
  template <int V>                                                                 \
  PORT_DEVICE Pack<V> operator op(Pack<V> a, const Pack<V> &b) {                   \
    PORT_UNROLL for (int k = 0; k < Pack<V>::parts; ++k) a.v[k] = a.v[k] op b.v[k]; \
    return a;                                                                      \
  }                                                                                \
  template <int V>                                                                 \
  PORT_DEVICE Pack<V> operator op(Pack<V> a, float b) {                            \
    PORT_UNROLL for (int k = 0; k < Pack<V>::parts; ++k) a.v[k] = a.v[k] op b;      \
    return a;                                                                      \
  }                                                                                \
  template <int V>                                                                 \
  PORT_DEVICE Pack<V> operator op(float a, Pack<V> b) {                            \
    PORT_UNROLL for (int k = 0; k < Pack<V>::parts; ++k) b.v[k] = a op b.v[k];      \
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
PORT_DEVICE float largest(float x) { return x; }
template <int V>
PORT_DEVICE float largest(const Pack<V> &x) {
  float most = x.v[0];
  PORT_UNROLL for (int k = 1; k < V; ++k) most = x.v[k] > most ? x.v[k] : most;
  return most;
}

// V neighbours at p, which on a GPU is aligned to them (or to 16 bytes).
template <int V, class T>
PORT_DEVICE Lanes<V> load(const T *p) {
  if constexpr (V == 1)
    return widen(*p);
  else
#if PORT_ONE_THREAD
    return load_pack(p);
#else
    return load_pack<V>(p);
#endif
}

// Stores x, and returns it as memory has it now.
template <class T>
PORT_DEVICE float stored(T *p, float x) {
  T narrowed;
  narrow(x, narrowed);
  *p = narrowed;
  return widen(narrowed);
}
template <class T, int V>
PORT_DEVICE Pack<V> stored(T *p, const Pack<V> &x) {
  return store_pack(p, x);
}

template <class T>
PORT_DEVICE void store(T *p, float x) {
  narrow(x, *p);
}
template <class T, int V>
PORT_DEVICE void store(T *p, const Pack<V> &x) {
  store_pack(p, x);
}

// Asks for V neighbours that will be read soon.
template <int V, class T>
PORT_DEVICE void prefetch([[maybe_unused]] const T *p) {
  if constexpr (V > 1)
    for (int64_t line = 0; line < V; line += 64 / (int64_t)sizeof(T)) PORT_PREFETCH(p + line);
}
