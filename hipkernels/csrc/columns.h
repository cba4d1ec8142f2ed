// Sums over rows, deterministic and without atomics: blocks own contiguous rows and write one row of partial sums each,
// then a second kernel adds those in a fixed order.
#pragma once

#include "block.h"

#define COLUMNS_STRIP 64

// sums[c] = parts[0][c] + parts[1][c] + ...: a block takes a strip of columns, its groups of 64 threads share the parts.
PORT_KERNEL(column_sums, float *sums, const float *parts, int64_t count, int64_t columns) {
  PORT_SHARED(float, strip, 16 * COLUMNS_STRIP);
  const int64_t begin = PORT_BLOCK * COLUMNS_STRIP, width = port_smaller(COLUMNS_STRIP, columns - begin);
#if PORT_ONE_THREAD
  for (int64_t c = 0; c < COLUMNS_STRIP; ++c) strip[c] = 0.0f;
  for (int64_t part = 0; part < count; ++part) {
    const float *row = parts + part * columns + begin;
    lanes_each<1>(0, width, [&](int64_t c) { strip[c] += row[c]; });
  }
  lanes_each<1>(0, width, [&](int64_t c) { sums[begin + c] = strip[c]; });
#else
  const int64_t c = PORT_THREAD % COLUMNS_STRIP, group = PORT_THREAD / COLUMNS_STRIP;
  const int64_t groups = PORT_THREADS / COLUMNS_STRIP;
  float sum = 0.0f;
  if (c < width)
    for (int64_t part = group; part < count; part += groups) sum += parts[part * columns + begin + c];
  strip[PORT_THREAD] = sum;
  PORT_BARRIER();
  if (group == 0 && c < width) {
    for (int64_t other = 1; other < groups; ++other) sum += strip[other * COLUMNS_STRIP + c];
    sums[begin + c] = sum;
  }
#endif
}

static inline int launch_column_sums(float *sums, const float *parts, int64_t count, int64_t columns, void *stream) {
  const int threads = port_threads(256);
  return port_launch(stream, port_ceil(columns, COLUMNS_STRIP), threads, column_sums, sums, parts, count, columns);
}
