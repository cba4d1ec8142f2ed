// Philox4x32-10 (Salmon et al. 2011): random words that are a function of a key and a counter.
#pragma once

#include "values.h"

struct Words {
  uint32_t w[4];
};

PORT_DEVICE uint32_t high_half(uint32_t x, uint32_t y) { return (uint32_t)(((uint64_t)x * y) >> 32); }

PORT_DEVICE Words philox(uint64_t key, uint64_t counter) {
  uint32_t a = (uint32_t)counter, b = (uint32_t)(counter >> 32), c = 0, d = 0;
  uint32_t k = (uint32_t)key, l = (uint32_t)(key >> 32);
  PORT_UNROLL for (int round = 0; round < 10; ++round) {
    // High and low halves of the products apart, for compilers find vector instructions for each.
    const uint32_t next_a = high_half(0xCD9E8D57u, c) ^ b ^ k, next_c = high_half(0xD2511F53u, a) ^ d ^ l;
    b = 0xCD9E8D57u * c;
    d = 0xD2511F53u * a;
    a = next_a;
    c = next_c;
    k += 0x9E3779B9u;
    l += 0xBB67AE85u;
  }
  return Words{{a, b, c, d}};
}

// Which elements of a sample are kept.
struct Keep {
  uint64_t key;
  uint32_t threshold;
};

#if PORT_ONE_THREAD
#define KEEP_TILE 256

// Calls f(0, i, kept) for every column i of a row whose first element is element `first` of its sample.
template <int V, class F>
PORT_DEVICE void kept_each(Keep keep, int64_t first, int64_t columns, F f) {
  alignas(64) uint32_t words[KEEP_TILE + 8];
  for (int64_t begin = 0; begin < columns; begin += KEEP_TILE) {
    const int64_t count = port_smaller(KEEP_TILE, columns - begin);
    const uint64_t element = (uint64_t)(first + begin), counter = element / 4;
    const int64_t skip = (int64_t)(element % 4), counters = (skip + count + 3) / 4;
#pragma omp simd
    for (int64_t c = 0; c < counters; ++c) {
      const Words random = philox(keep.key, counter + (uint64_t)c);
      words[4 * c] = random.w[0];
      words[4 * c + 1] = random.w[1];
      words[4 * c + 2] = random.w[2];
      words[4 * c + 3] = random.w[3];
    }
    lanes_each<1>(0, count, [&](int64_t i) { f(0, begin + i, words[skip + i] >= keep.threshold ? 1.0f : 0.0f); });
  }
}
template <int V, class F>
PORT_DEVICE void kept_owned(Keep keep, int64_t first, int64_t columns, F f) {
  kept_each<V>(keep, first, columns, f);
}
#else
// 1 for kept elements of the pack that starts at this element of the sample, else 0. Packs start at multiples of 4.
template <int V>
PORT_DEVICE Lanes<V> kept(Keep keep, int64_t element) {
  if constexpr (V == 1) {
    const Words random = philox(keep.key, (uint64_t)element / 4);
    const uint32_t part = (uint32_t)element % 4;
    const uint32_t word = part < 2 ? (part ? random.w[1] : random.w[0]) : (part == 2 ? random.w[2] : random.w[3]);
    return word >= keep.threshold ? 1.0f : 0.0f;
  } else {
    Pack<V> pack;
    PORT_UNROLL for (int quad = 0; quad < V / 4; ++quad) {
      const Words random = philox(keep.key, (uint64_t)element / 4 + (uint64_t)quad);
      PORT_UNROLL for (int k = 0; k < 4; ++k) pack.v[4 * quad + k] = random.w[k] >= keep.threshold ? 1.0f : 0.0f;
    }
    return pack;
  }
}

template <int V, class F>
PORT_DEVICE void kept_each(Keep keep, int64_t first, int64_t columns, F f) {
  lanes_each<V>(0, columns, [&](int64_t i) { f(0, i, kept<V>(keep, first + i)); });
}
template <int V, class F>
PORT_DEVICE void kept_owned(Keep keep, int64_t first, int64_t columns, F f) {
  owned_each<V>(columns, [&](int k, int64_t i) { f(k, i, kept<V>(keep, first + i)); });
}
#endif
