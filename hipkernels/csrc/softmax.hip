// Softmax of scaled scores with a mask, a causal one, or both; for models that do not use torch's attention.
#include "block.h"
#include "functions.h"

struct Mask {
  const uint8_t *allowed;
  int64_t heads, queries, batch_stride, head_stride, query_stride;
  int causal;
};

// Elements that are out become minus infinity.
template <class L>
PORT_DEVICE L masked(L x, const uint8_t *allowed, int64_t i) {
  return map_lane(x, [&](float value, int k) { return allowed[i + k] ? value : PORT_LOWEST; });
}

template <class T, int V>
PORT_KERNEL(softmax_forward, T *y, const T *x, Mask mask, int64_t rows, int64_t columns, int64_t each, float scale) {
  const int64_t end = port_smaller(rows, (PORT_BLOCK + 1) * each);
  for (int64_t row = PORT_BLOCK * each; row < end; ++row) {
    const int64_t query = row % mask.queries, head = row / mask.queries % mask.heads;
    const int64_t batch = row / mask.queries / mask.heads;
    const int64_t seen = mask.causal ? port_larger(0, port_smaller(columns, query + columns - mask.queries + 1)) : columns;
    // Packs hold only seen elements; the few of a row that are left over go one by one.
    const int64_t packed = seen / V * V;
    const T *in = x + row * columns;
    T *out = y + row * columns;
    choose(mask.allowed != nullptr, [&](auto has_mask) {
      const uint8_t *allowed =
          mask.allowed + batch * mask.batch_stride + head * mask.head_stride + query * mask.query_stride;
      const auto score = [&](int64_t i, auto lanes) {
        const auto value = load<decltype(lanes)::value>(in + i) * scale;
        if constexpr (has_mask.value)
          return masked(value, allowed, i);
        else
          return value;
      };
      float most = lanes_max<V>(0, packed, [&](int64_t i) { return largest(score(i, Size<V>{})); });
      if constexpr (V > 1) {
        const float other = lanes_max<1>(packed, seen, [&](int64_t i) { return score(i, Size<1>{}); });
        most = other > most ? other : most;
      }
      most = block_max(most);
      // With nothing seen every score is minus infinity; its power relative to 0 is 0, and the row becomes 0.
      const float base = most == PORT_LOWEST ? 0.0f : most;
      const auto power = [&](float value) { return port_exp(value - base); };
      float sum = lanes_sum<V>(0, packed, [&](int64_t i) { return addend(map(score(i, Size<V>{}), power)); });
      if constexpr (V > 1) sum += lanes_sum<1>(packed, seen, [&](int64_t i) { return power(score(i, Size<1>{})); });
      sum = block_sum(sum);
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      lanes_each<V>(0, packed, [&](int64_t i) { store(out + i, map(score(i, Size<V>{}), power) * inverse); });
      if constexpr (V > 1)
        lanes_each<1>(packed, seen, [&](int64_t i) { store(out + i, power(score(i, Size<1>{})) * inverse); });
      lanes_each<1>(seen, columns, [&](int64_t i) { store(out + i, 0.0f); });
    });
  }
}

template <class T, int V>
PORT_KERNEL(softmax_backward, T *dx, const T *dy, const T *y, int64_t rows, int64_t columns, int64_t each,
            float scale) {
  const int64_t end = port_smaller(rows, (PORT_BLOCK + 1) * each);
  for (int64_t row = PORT_BLOCK * each; row < end; ++row) {
    const T *in = dy + row * columns, *result = y + row * columns;
    T *out = dx + row * columns;
    const float dot = block_sum(
        lanes_sum<V>(0, columns, [&](int64_t i) { return addend(load<V>(in + i) * load<V>(result + i)); }));
    lanes_each<V>(0, columns, [&](int64_t i) { store(out + i, load<V>(result + i) * (load<V>(in + i) - dot) * scale); });
  }
}

int pipert_softmax_forward(void *y, const void *x, const void *mask, int64_t batch, int64_t heads, int64_t queries,
                           int64_t columns, int64_t mask_batch, int64_t mask_head, int64_t mask_query, double scale,
                           int causal, int dtype, void *stream) {
  if (batch < 0 || heads < 1 || queries < 1 || columns < 1) return PORT_BAD_SIZE;
  const int64_t rows = batch * heads * queries;
  const PortSplit split = port_split(rows, PORT_GRID);
  const Mask where = {(const uint8_t *)mask, heads, queries, mask_batch, mask_head, mask_query, causal};
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return with_width<T>(Width(columns).pointer(y).pointer(x), [&](auto size) {
      constexpr int V = size.value;
      return port_launch(stream, split.blocks, port_threads(columns / V), softmax_forward<T, V>, (T *)y, (const T *)x,
                         where, rows, columns, split.each, (float)scale);
    });
  });
}

int pipert_softmax_backward(void *dx, const void *dy, const void *y, int64_t rows, int64_t columns, double scale,
                            int dtype, void *stream) {
  if (rows < 0 || columns < 1) return PORT_BAD_SIZE;
  const PortSplit split = port_split(rows, PORT_GRID);
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return with_width<T>(Width(columns).pointer(dx).pointer(dy).pointer(y), [&](auto size) {
      constexpr int V = size.value;
      return port_launch(stream, split.blocks, port_threads(columns / V), softmax_backward<T, V>, (T *)dx,
                         (const T *)dy, (const T *)y, rows, columns, split.each, (float)scale);
    });
  });
}
