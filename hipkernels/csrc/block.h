// Reductions over a block: the only way that threads of a block talk to each other.
//
// Every thread gets the result. The order of additions depends on the number of threads alone, so a result is the same
// in every run. The first barrier keeps a reduction from overwriting what slower waves still read of the one before.
#pragma once

#include "values.h"

#if PORT_ONE_THREAD
template <class T, class Join>
PORT_DEVICE T block_reduce(T x, Join) {
  return x;
}
#else
PORT_DEVICE Two port_shuffle_xor(Two x, int mask) {
  return Two{port_shuffle_xor(x.a, mask), port_shuffle_xor(x.b, mask)};
}

template <class T, class Join>
PORT_DEVICE T block_reduce(T x, Join join) {
  PORT_SHARED(T, parts, 32);
  for (int mask = PORT_WAVE / 2; mask > 0; mask /= 2) x = join(x, port_shuffle_xor(x, mask));
  PORT_BARRIER();
  if (PORT_THREAD % PORT_WAVE == 0) parts[PORT_THREAD / PORT_WAVE] = x;
  PORT_BARRIER();
  x = parts[0];
  for (int64_t wave = 1; wave < PORT_THREADS / PORT_WAVE; ++wave) x = join(x, parts[wave]);
  return x;
}
#endif

template <class T>
PORT_DEVICE T block_sum(T x) {
  return block_reduce(x, [](T a, T b) { return a + b; });
}

PORT_DEVICE float block_max(float x) {
  return block_reduce(x, [](float a, float b) { return a > b ? a : b; });
}
