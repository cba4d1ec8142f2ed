// Bias, dropout and residual in one pass. The mask is a function of (key of the sample, element), so it is the same in
// the backward pass, under recompute and in every layout.
#include "columns.h"
#include "philox.h"

// How samples lie in the rows.
struct Samples {
  const int64_t *keys;
  int64_t rows_each, offset;
  uint32_t threshold;
};

PORT_DEVICE Keep keep_of(const Samples &samples, int64_t row) {
  return Keep{(uint64_t)samples.keys[row / samples.rows_each], samples.threshold};
}

PORT_DEVICE int64_t first_of(const Samples &samples, int64_t row, int64_t columns) {
  return samples.offset + row % samples.rows_each * columns;
}

template <class L>
PORT_DEVICE L dropped(L x, L keep, float factor) {
  return map(x, keep, [&](float value, float k) { return k > 0.0f ? value * factor : 0.0f; });
}

template <class T, int V>
PORT_KERNEL(dropout_forward, T *y, const T *x, const float *bias, const T *residual, Samples samples, int64_t rows,
            int64_t columns, int64_t each, float factor) {
  const int64_t end = port_smaller(rows, (PORT_BLOCK + 1) * each);
  for (int64_t row = PORT_BLOCK * each; row < end; ++row) {
    const T *in = x + row * columns, *other = residual + row * columns;
    T *out = y + row * columns;
    choose(bias != nullptr, [&](auto has_bias) {
      choose(residual != nullptr, [&](auto has_residual) {
        kept_each<V>(keep_of(samples, row), first_of(samples, row, columns), columns, [&](int, int64_t i, Lanes<V> keep) {
          Lanes<V> value = load<V>(in + i);
          if constexpr (has_bias.value) value = value + load<V>(bias + i);
          value = dropped(value, keep, factor);
          if constexpr (has_residual.value) value = value + load<V>(other + i);
          store(out + i, value);
        });
      });
    });
  }
}

template <class T, int V>
PORT_OWNER_KERNEL(dropout_backward, T *dx, float *workspace, const T *dy, Samples samples, int64_t rows, int64_t columns,
            int64_t each, float factor) {
  Owned<T, V> dbias(workspace + PORT_BLOCK * columns, columns);
  const int64_t end = port_smaller(rows, (PORT_BLOCK + 1) * each);
  for (int64_t row = PORT_BLOCK * each; row < end; ++row) {
    const T *in = dy + row * columns;
    T *out = dx + row * columns;
    kept_owned<V>(keep_of(samples, row), first_of(samples, row, columns), columns,
                  [&](int k, int64_t i, Lanes<V> keep) {
                    const Lanes<V> value = dropped(load<V>(in + i), keep, factor);
                    store(out + i, value);
                    dbias.add(k, i, value);
                  });
  }
  dbias.write(columns);
}

// Packs must start at multiples of 4 elements of the sample.
static Width width_of(int64_t columns, int64_t offset) {
  Width width(columns);
  width.aligned = offset % 4 == 0;
  return width;
}

int pipert_dropout_forward(void *y, const void *x, const float *bias, const void *residual, const int64_t *keys,
                           int64_t rows, int64_t columns, int64_t rows_per_sample, int64_t offset, int64_t threshold,
                           double factor, int dtype, void *stream) {
  if (rows < 0 || columns < 1 || rows_per_sample < 1 || offset < 0) return PORT_BAD_SIZE;
  const PortSplit split = port_split(rows, PORT_GRID);
  const Samples samples = {keys, rows_per_sample, offset, (uint32_t)threshold};
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const Width width = width_of(columns, offset).pointer(y).pointer(x).pointer(bias).pointer(residual);
    return with_width<T>(width, [&](auto size) {
      constexpr int V = size.value;
      return port_launch(stream, split.blocks, port_threads(columns / V), dropout_forward<T, V>, (T *)y, (const T *)x,
                         bias, (const T *)residual, samples, rows, columns, split.each, (float)factor);
    });
  });
}

int pipert_dropout_backward(void *dx, float *sums, float *workspace, int64_t parts, const void *dy,
                            const int64_t *keys, int64_t rows, int64_t columns, int64_t rows_per_sample,
                            int64_t offset, int64_t threshold, double factor, int dtype, void *stream) {
  if (rows < 0 || columns < 1 || rows_per_sample < 1 || offset < 0 || parts < 1) return PORT_BAD_SIZE;
  const PortSplit split = port_split(rows, parts);
  const int threads = port_owners(columns);
  if (!threads) return PORT_TOO_WIDE;
  const Samples samples = {keys, rows_per_sample, offset, (uint32_t)threshold};
  const int code = with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const Width width = width_of(columns, offset).pointer(dx).pointer(dy).pointer(workspace);
    return with_width<T>(width, [&](auto size) {
      constexpr int V = size.value;
      return port_launch(stream, split.blocks, threads, dropout_backward<T, V>, (T *)dx, workspace, (const T *)dy,
                         samples, rows, columns, split.each, (float)factor);
    });
  });
  return code ? code : launch_column_sums(sums, workspace, split.blocks, columns, stream);
}
