// Packs of the CPU: two vectors of floats, V = 2 * PORT_FLOATS neighbours, for kernels that only add and multiply. (What
// they are for is the 16-bit types: compilers turn loops over those into two to three times as many instructions.)
//
// The lanes of a pack of bfloat16 are its even elements and then its odd ones, since a 32-bit word of memory is a pair
// of them: one shift and one mask widen it. Floats that meet such packs lie in memory in the same order (see Columns).
#pragma once

#include <stdlib.h>

#include "storage.h"

// Widest pack of a storage type: most kernels leave vector instructions to the compiler.
template <class T>
struct Widest {
  static constexpr int lanes = 1;
};
// Widest pack in kernels that do nothing with packs but arithmetic.
template <class T>
struct WidestArithmetic {
  static constexpr int lanes = 2 * PORT_FLOATS;
};
#if !PORT_HALF_VECTORS
template <>
struct WidestArithmetic<fp16> {
  static constexpr int lanes = 1;
};
#endif

template <int V>
struct Pack {
  static constexpr int parts = 2;
  port_floats v[2];
};

template <class To>
PORT_DEVICE To read_as(const void *p) {
  To to;
  memcpy(&to, p, sizeof(to));
  return to;
}
template <class To, class From>
PORT_DEVICE To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  return read_as<To>(&x);
}

typedef Pack<2 * PORT_FLOATS> Vectors;

PORT_DEVICE float total(const Vectors &x) {
  port_floats sum = x.v[0] + x.v[1];
#pragma GCC unroll 4
  for (int half = PORT_FLOATS / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int k = 0; k < half; ++k) sum[k] += sum[k + half];
  return sum[0];
}

PORT_DEVICE Vectors load_pack(const float *p) {
  return Vectors{{read_as<port_floats>(p), read_as<port_floats>(p + PORT_FLOATS)}};
}
PORT_DEVICE Vectors store_pack(float *p, const Vectors &x) {
  memcpy(p, &x.v[0], sizeof(x.v[0]));
  memcpy(p + PORT_FLOATS, &x.v[1], sizeof(x.v[1]));
  return x;
}

PORT_DEVICE Vectors widen_pairs(port_words pairs) {
  return Vectors{{bits_as<port_floats>(pairs << 16), bits_as<port_floats>(pairs & 0xffff0000u)}};
}
PORT_DEVICE Vectors load_pack(const bf16 *p) {
  return widen_pairs(read_as<port_words>(p));
}
// As narrow(float, bf16 &), in the upper halves of words; the lower ones are left over.
PORT_DEVICE port_words narrow_upper(port_floats x) {
  const port_words bits = bits_as<port_words>(x), zero = {};
  const port_words half = (bits & 0x10000u) != 0 ? zero + 0x8000u : zero + 0x7fffu;
  return x != x ? zero + 0x7fc00000u : bits + half;
}
PORT_DEVICE port_words narrow_pairs(const Vectors &x) {
#if PORT_BF16_VECTORS
  port_words pairs;
  if (__builtin_expect(port_narrow_normal(x.v[0], x.v[1], &pairs), 1)) return pairs;
#endif
  return narrow_upper(x.v[0]) >> 16 | (narrow_upper(x.v[1]) & 0xffff0000u);
}
PORT_DEVICE Vectors store_pack(bf16 *p, const Vectors &x) {
  const port_words pairs = narrow_pairs(x);
  memcpy(p, &pairs, sizeof(pairs));
  return widen_pairs(pairs);
}

#if PORT_HALF_VECTORS
PORT_DEVICE Vectors load_pack(const fp16 *p) {
  return Vectors{{port_widen_half(p), port_widen_half(p + PORT_FLOATS)}};
}
PORT_DEVICE Vectors store_pack(fp16 *p, const Vectors &x) {
  port_narrow_half(p, x.v[0]);
  port_narrow_half(p + PORT_FLOATS, x.v[1]);
  return load_pack(p);
}
#endif

// Where in a pack's lanes its element e is.
template <class T>
constexpr int64_t lane_of(int64_t e) {
  return e;
}
template <>
constexpr int64_t lane_of<bf16>(int64_t e) {
  return e % 2 * PORT_FLOATS + e / 2;
}

// Floats in the order of lanes, back in the order of elements.
template <class T, int V>
PORT_DEVICE void order_elements(float *memory, int64_t columns) {
  if (V == 1 || lane_of<T>(1) == 1) return;
  for (int64_t i = 0; i < columns; i += V) {
    float lanes[V];
    memcpy(lanes, memory + i, sizeof(lanes));
    for (int64_t e = 0; e < V; ++e) memory[i + e] = lanes[lane_of<T>(e)];
  }
}

// Host side: vectors over the columns, in the order of lanes. Null stays null.
template <class T, int V>
struct Columns {
  const float *p;
  float *copy = nullptr;
  bool ok = true;
  Columns(const float *vector, int64_t columns) : p(vector) {
    if (!vector || V == 1 || lane_of<T>(1) == 1) return;
    p = copy = (float *)malloc((size_t)columns * sizeof(float));
    ok = copy;
    if (ok)
      for (int64_t i = 0; i < columns; ++i) copy[i / V * V + lane_of<T>(i % V)] = vector[i];
  }
  Columns(const Columns &) = delete;
  ~Columns() { free(copy); }
};
