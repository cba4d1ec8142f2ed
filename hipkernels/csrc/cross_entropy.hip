// Cross-entropy of logits, for a vocabulary in one piece or shared out: statistics of a shard in one pass (the online
// softmax of Milakov and Gimelshein 2018, for each thread's part of a chunk), and the gradient in place.
#include "block.h"
#include "functions.h"

// What one thread has seen: the largest logit, and sums relative to it.
struct Online {
  float most, powers, rest;
  int64_t count;
};

PORT_DEVICE void raise_to(Online &seen, float most) {
  if (!(most > seen.most)) return;
  if (seen.count) {
    seen.powers *= port_exp(seen.most - most);
    seen.rest += (float)seen.count * (seen.most - most);
  }
  seen.most = most;
}

template <class T, int V>
PORT_KERNEL(cross_entropy_statistics, float *statistics, const T *logits, const int64_t *targets, int64_t rows,
            int64_t columns, int64_t stride, int64_t first, int64_t each) {
  const int64_t end = port_smaller(rows, (PORT_BLOCK + 1) * each);
  const int64_t chunk = PORT_ONE_THREAD ? 2048 : PORT_THREADS * V * 4;
  for (int64_t row = PORT_BLOCK * each; row < end; ++row) {
    const T *in = logits + row * stride;
    Online seen = {PORT_LOWEST, 0.0f, 0.0f, 0};
    for (int64_t begin = 0; begin < columns; begin += chunk) {
      const int64_t stop = port_smaller(columns, begin + chunk);
      raise_to(seen, lanes_max<V>(begin, stop, [&](int64_t i) { return largest(load<V>(in + i)); }));
      // With nothing but minus infinity so far, differences to it are taken from 0.
      const float base = seen.most == PORT_LOWEST ? 0.0f : seen.most;
      const Two sums = lanes_sum_two<V>(begin, stop, [&](int64_t i) {
        const auto x = load<V>(in + i) - base;
        return addends(map(x, [](float z) { return port_exp(z); }), x);
      });
      seen.powers += sums.a;
      seen.rest += sums.b;
      seen.count += lanes_count<V>(begin, stop);
    }
    const float most = block_max(seen.most);
    raise_to(seen, most);
    const Two sums = block_sum(Two{seen.powers, seen.rest});
    if (PORT_THREAD == 0) {
      const int64_t target = targets[row] - first;
      statistics[row] = most;
      statistics[rows + row] = sums.a;
      statistics[2 * rows + row] = target >= 0 && target < columns ? widen(in[target]) : 0.0f;
      statistics[3 * rows + row] = sums.b;
    }
  }
}

template <class T, int V>
PORT_KERNEL(cross_entropy_gradient, T *dx, const T *logits, const int64_t *targets, const float *maximum,
            const float *inverse_sum, const float *gradient, int64_t rows, int64_t columns, int64_t stride,
            int64_t first, int64_t each, float hit, float even) {
  const int64_t end = port_smaller(rows, (PORT_BLOCK + 1) * each);
  for (int64_t row = PORT_BLOCK * each; row < end; ++row) {
    const T *in = logits + row * stride;
    T *out = dx + row * stride;
    const float most = maximum[row], factor = gradient[row], scale = inverse_sum[row] * factor, shift = even * factor;
    const int64_t target = targets[row] - first;
    // The target's thread writes it a second time, from what it has read before.
    const bool here = target >= 0 && target < columns && PORT_THREAD == target / V % PORT_THREADS;
    const float logit = here ? widen(in[target]) : 0.0f;
    if (factor == 0.0f) {
      lanes_each<V>(0, columns, [&](int64_t i) { store(out + i, Lanes<V>{}); });
    } else {
      lanes_each<V>(0, columns, [&](int64_t i) {
        store(out + i, map(load<V>(in + i), [&](float x) { return port_exp(x - most) * scale - shift; }));
      });
      if (here) store(out + target, port_exp(logit - most) * scale - shift - hit * factor);
    }
    lanes_each<1>(columns, stride, [&](int64_t i) { store(out + i, 0.0f); });
  }
}

int pipert_cross_entropy_statistics(float *statistics, const void *logits, const int64_t *targets, int64_t rows,
                                    int64_t columns, int64_t stride, int64_t first, int dtype, void *stream) {
  if (rows < 0 || columns < 1 || stride < columns) return PORT_BAD_SIZE;
  const PortSplit split = port_split(rows, PORT_GRID);
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    Width width(columns);
    width.pointer(logits).aligned &= stride % Widest<T>::lanes == 0;
    return with_width<T>(width, [&](auto size) {
      constexpr int V = size.value;
      return port_launch(stream, split.blocks, port_threads(columns / V), cross_entropy_statistics<T, V>, statistics,
                         (const T *)logits, targets, rows, columns, stride, first, split.each);
    });
  });
}

int pipert_cross_entropy_gradient(void *dx, const void *logits, const int64_t *targets, const float *maximum,
                                  const float *inverse_sum, const float *gradient, int64_t rows, int64_t columns,
                                  int64_t stride, int64_t first, double hit, double even, int dtype, void *stream) {
  if (rows < 0 || columns < 1 || stride < columns) return PORT_BAD_SIZE;
  const PortSplit split = port_split(rows, PORT_GRID);
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    Width width(columns);
    width.pointer(dx).pointer(logits).aligned &= stride % Widest<T>::lanes == 0;
    return with_width<T>(width, [&](auto size) {
      constexpr int V = size.value;
      return port_launch(stream, split.blocks, port_threads(columns / V), cross_entropy_gradient<T, V>, (T *)dx,
                         (const T *)logits, targets, maximum, inverse_sum, gradient, rows, columns, stride, first,
                         split.each, (float)hit, (float)even);
    });
  });
}
