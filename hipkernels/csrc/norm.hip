// LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019), with the addition of a residual.
#include "columns.h"
#include "functions.h"

// The input of a row: x, or h = x + residual, which is stored on the way.
template <class T>
struct Input {
  const T *x, *residual;
  T *h;
  PORT_METHOD float first(int64_t i) const { return widen(x[i]) + (residual ? widen(residual[i]) : 0.0f); }
  template <int V, class R>
  PORT_METHOD Lanes<V> read(int64_t i, R has_residual) const {
    if constexpr (has_residual.value) {
      return stored(h + i, load<V>(x + i) + load<V>(residual + i));
    } else {
      return load<V>(x + i);
    }
  }
  template <int V, class R>
  PORT_METHOD void ask(int64_t i, R has_residual) const {
    prefetch<V>(x + i);
    if constexpr (has_residual.value) prefetch<V>(residual + i);
  }
};

// The sums are those of x - pivot and of its square, pivot being the row's first element: mean and variance in one pass.
// Where the pivot is so far from the mean that their difference would lose digits, the squares are summed anew.
template <class T, int V>
PORT_KERNEL(norm_forward, T *y, float *means, float *rstds, Input<T> input, const float *weight, const float *bias,
            int64_t rows, int64_t columns, int64_t each, float eps, int centred) {
  const int64_t end = port_smaller(rows, (PORT_BLOCK + 1) * each);
  choose(input.residual != nullptr, [&](auto has_residual) {
    for (int64_t row = PORT_BLOCK * each; row < end; ++row) {
      const T *in = (has_residual.value ? input.h : input.x) + row * columns;
      T *out = y + row * columns;
      const float pivot = centred ? input.first(row * columns) : 0.0f;
      const Two sums = block_sum(lanes_sum_two<V>(0, columns, [&](int64_t i) {
        const auto d = input.template read<V>(row * columns + i, has_residual) - pivot;
        return addends(d, d * d);
      }));
      float mean = 0.0f, squares = sums.b;
      if (centred) {
        const float shift = sums.a / (float)columns, lost = shift * sums.a;
        mean = pivot + shift;
        squares = sums.b - lost;
        if (!(lost < 8.0f * squares))  // also for NaN
          squares = block_sum(lanes_sum<V>(0, columns, [&](int64_t i) {
            const auto d = load<V>(in + i) - mean;
            return addend(d * d);
          }));
      }
      const float rstd = 1.0f / port_sqrt(squares / (float)columns + eps);
      const int64_t ahead = row + 1 < end ? columns : 0;
      choose(bias != nullptr, [&](auto has_bias) {
        lanes_each<V>(0, columns, [&](int64_t i) {
          input.template ask<V>(row * columns + ahead + i, has_residual);
          auto value = (load<V>(in + i) - mean) * rstd * load<V>(weight + i);
          if constexpr (has_bias.value) value = value + load<V>(bias + i);
          store(out + i, value);
        });
      });
      if (PORT_THREAD == 0) {
        means[row] = mean;
        rstds[row] = rstd;
      }
    }
  });
}

// One loop over a row reads and sums, the other writes: mixed, the writes to memory would hold up those to the cache.
template <class T, int V>
PORT_OWNER_KERNEL(norm_backward, T *dx, float *workspace, const T *dy, const T *dh, const T *h, const float *weight,
            const float *means, const float *rstds, int64_t rows, int64_t columns, int64_t each, int centred) {
  float *parts = workspace + PORT_BLOCK * 2 * columns;
  Owned<T, V> dweight(parts, columns), dbias(parts + columns, columns);
  const int64_t end = port_smaller(rows, (PORT_BLOCK + 1) * each);
  for (int64_t row = PORT_BLOCK * each; row < end; ++row) {
    const T *in = h + row * columns, *up = dy + row * columns;
    T *out = dx + row * columns;
    const float mean = means[row], rstd = rstds[row];
    const Two sums = block_sum(owned_sum_two<V>(columns, [&](int k, int64_t i) {
      const auto g = load<V>(up + i), product = g * (load<V>(in + i) - mean), w = load<V>(weight + i);
      dweight.add(k, i, product * rstd);
      dbias.add(k, i, g);
      return addends(g * w, product * w);
    }));
    const float shift = centred ? sums.a / (float)columns : 0.0f, slope = sums.b * rstd * rstd / (float)columns;
    const int64_t ahead = row + 1 < end ? columns : 0;
    choose(dh != nullptr, [&](auto has_dh) {
      lanes_each<V>(0, columns, [&](int64_t i) {
        prefetch<V>(up + ahead + i);
        prefetch<V>(in + ahead + i);
        auto value = (load<V>(up + i) * load<V>(weight + i) - ((load<V>(in + i) - mean) * slope + shift)) * rstd;
        if constexpr (has_dh.value) value = value + load<V>(dh + row * columns + i);
        store(out + i, value);
      });
    });
  }
  dweight.write(columns);
  dbias.write(columns);
}

int pipert_norm_forward(void *y, void *h, float *mean, float *rstd, const void *x, const void *residual,
                        const float *weight, const float *bias, int64_t rows, int64_t columns, double eps, int centred,
                        int dtype, void *stream) {
  if (rows < 0 || columns < 1 || (residual && !h)) return PORT_BAD_SIZE;
  const PortSplit split = port_split(rows, PORT_GRID);
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const Width width = Width(columns).pointer(x).pointer(y).pointer(h).pointer(residual).pointer(weight).pointer(bias);
    return with_arithmetic_width<T>(width, [&](auto size) {
      constexpr int V = size.value;
      const Columns<T, V> weights(weight, columns), biases(bias, columns);
      if (!weights.ok || !biases.ok) return (int)PORT_NO_MEMORY;
      return port_launch(stream, split.blocks, port_threads(columns / V), norm_forward<T, V>, (T *)y, mean, rstd,
                         Input<T>{(const T *)x, (const T *)residual, (T *)h}, weights.p, biases.p, rows, columns,
                         split.each, (float)eps, centred);
    });
  });
}

int pipert_norm_backward(void *dx, float *sums, float *workspace, int64_t parts, const void *dy, const void *dh,
                         const void *h, const float *weight, const float *mean, const float *rstd, int64_t rows,
                         int64_t columns, int centred, int dtype, void *stream) {
  if (rows < 0 || columns < 1 || parts < 1) return PORT_BAD_SIZE;
  const PortSplit split = port_split(rows, parts);
  const int threads = port_owners(columns);
  if (!threads) return PORT_TOO_WIDE;
  const int code = with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const Width width = Width(columns).pointer(dx).pointer(dy).pointer(dh).pointer(h).pointer(weight).pointer(workspace);
    return with_arithmetic_width<T>(width, [&](auto size) {
      constexpr int V = size.value;
      const Columns<T, V> weights(weight, columns);
      if (!weights.ok) return (int)PORT_NO_MEMORY;
      return port_launch(stream, split.blocks, threads, norm_backward<T, V>, (T *)dx, workspace, (const T *)dy,
                         (const T *)dh, (const T *)h, weights.p, mean, rstd, rows, columns, split.each, centred);
    });
  });
  return code ? code : launch_column_sums(sums, workspace, split.blocks, 2 * columns, stream);
}
