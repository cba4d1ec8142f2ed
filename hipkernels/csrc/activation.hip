// GELU with a bias, and SwiGLU (Shazeer 2020).
#include "columns.h"
#include "functions.h"

template <int TANH>
PORT_DEVICE ValueSlope gelu(float x) {
  if constexpr (TANH)
    return gelu_tanh(x);
  else
    return gelu_erf(x);
}

template <class T, int V, int TANH>
PORT_KERNEL(gelu_forward, T *y, const T *x, const float *bias, int64_t rows, int64_t columns, int64_t each) {
  const int64_t end = port_smaller(rows, (PORT_BLOCK + 1) * each);
  for (int64_t row = PORT_BLOCK * each; row < end; ++row) {
    const T *in = x + row * columns;
    T *out = y + row * columns;
    choose(bias != nullptr, [&](auto has_bias) {
      lanes_each<V>(0, columns, [&](int64_t i) {
        auto value = load<V>(in + i);
        if constexpr (has_bias.value) value = value + load<V>(bias + i);
        store(out + i, map(value, [](float z) { return gelu<TANH>(z).value; }));
      });
    });
  }
}

template <class T, int V, int TANH>
PORT_OWNER_KERNEL(gelu_backward, T *dx, float *workspace, const T *dy, const T *x, const float *bias, int64_t rows,
            int64_t columns, int64_t each) {
  Owned<T, V> dbias(workspace + PORT_BLOCK * columns, columns);
  const int64_t end = port_smaller(rows, (PORT_BLOCK + 1) * each);
  for (int64_t row = PORT_BLOCK * each; row < end; ++row) {
    const T *in = x + row * columns, *up = dy + row * columns;
    T *out = dx + row * columns;
    owned_each<V>(columns, [&](int k, int64_t i) {
      const auto slope = map(load<V>(in + i) + load<V>(bias + i), [](float z) { return gelu<TANH>(z).slope; });
      const auto value = load<V>(up + i) * slope;
      store(out + i, value);
      dbias.add(k, i, value);
    });
  }
  dbias.write(columns);
}

// Without a bias a matrix is one row, cut into contiguous chunks.
template <class T, int V, int TANH>
PORT_KERNEL(gelu_slope, T *dx, const T *dy, const T *x, int64_t n, int64_t each) {
  lanes_each<V>(PORT_BLOCK * each, port_smaller(n, (PORT_BLOCK + 1) * each), [&](int64_t i) {
    store(dx + i, load<V>(dy + i) * map(load<V>(x + i), [](float z) { return gelu<TANH>(z).slope; }));
  });
}

template <class T, int V>
PORT_KERNEL(swiglu_forward, T *y, const T *x, int64_t rows, int64_t columns, int64_t each) {
  const int64_t end = port_smaller(rows, (PORT_BLOCK + 1) * each);
  for (int64_t row = PORT_BLOCK * each; row < end; ++row) {
    const T *gate = x + row * 2 * columns, *up = gate + columns;
    T *out = y + row * columns;
    lanes_each<V>(0, columns, [&](int64_t i) {
      store(out + i, load<V>(up + i) * map(load<V>(gate + i), [](float g) { return g * sigmoid(g); }));
    });
  }
}

template <class T, int V>
PORT_KERNEL(swiglu_backward, T *dx, const T *dy, const T *x, int64_t rows, int64_t columns, int64_t each) {
  const int64_t end = port_smaller(rows, (PORT_BLOCK + 1) * each);
  for (int64_t row = PORT_BLOCK * each; row < end; ++row) {
    const T *gate = x + row * 2 * columns, *up = gate + columns, *in = dy + row * columns;
    T *dgate = dx + row * 2 * columns, *dup = dgate + columns;
    lanes_each<V>(0, columns, [&](int64_t i) {
      const auto g = load<V>(gate + i), d = load<V>(in + i);
      const auto s = map(g, [](float z) { return sigmoid(z); });
      store(dgate + i, d * load<V>(up + i) * s * (1.0f + g * (1.0f - s)));
      store(dup + i, d * g * s);
    });
  }
}

template <int TANH>
static int gelu_forward_rows(void *y, const void *x, const float *bias, int64_t rows, int64_t columns, int dtype,
                             void *stream) {
  const PortSplit split = port_split(rows, PORT_GRID);
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return with_width<T>(Width(columns).pointer(y).pointer(x).pointer(bias), [&](auto size) {
      constexpr int V = size.value;
      return port_launch(stream, split.blocks, port_threads(columns / V), gelu_forward<T, V, TANH>, (T *)y,
                         (const T *)x, bias, rows, columns, split.each);
    });
  });
}

template <int TANH>
static int gelu_backward_rows(void *dx, float *workspace, const PortSplit &split, const void *dy, const void *x,
                              const float *bias, int64_t rows, int64_t columns, int dtype, void *stream) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const Width width = Width(columns).pointer(dx).pointer(dy).pointer(x).pointer(bias).pointer(workspace);
    return with_width<T>(width, [&](auto size) {
      constexpr int V = size.value;
      if (bias) {
        const int threads = port_owners(columns);
        if (!threads) return (int)PORT_TOO_WIDE;
        return port_launch(stream, split.blocks, threads, gelu_backward<T, V, TANH>, (T *)dx, workspace, (const T *)dy,
                           (const T *)x, bias, rows, columns, split.each);
      }
      const Chunks chunks = chunks_of(rows * columns);
      return port_launch(stream, chunks.blocks, chunks.threads, gelu_slope<T, V, TANH>, (T *)dx, (const T *)dy,
                         (const T *)x, rows * columns, chunks.each);
    });
  });
}

int pipert_gelu_forward(void *y, const void *x, const float *bias, int64_t rows, int64_t columns, int tanh, int dtype,
                        void *stream) {
  if (rows < 0 || columns < 1) return PORT_BAD_SIZE;
  return (tanh ? gelu_forward_rows<1> : gelu_forward_rows<0>)(y, x, bias, rows, columns, dtype, stream);
}

int pipert_gelu_backward(void *dx, float *sums, float *workspace, int64_t parts, const void *dy, const void *x,
                         const float *bias, int64_t rows, int64_t columns, int tanh, int dtype, void *stream) {
  if (rows < 0 || columns < 1 || parts < 1) return PORT_BAD_SIZE;
  const PortSplit split = port_split(rows, parts);
  const int code = (tanh ? gelu_backward_rows<1> : gelu_backward_rows<0>)(dx, workspace, split, dy, x, bias, rows,
                                                                          columns, dtype, stream);
  return code || !bias ? code : launch_column_sums(sums, workspace, split.blocks, columns, stream);
}

int pipert_swiglu_forward(void *y, const void *x, int64_t rows, int64_t columns, int dtype, void *stream) {
  if (rows < 0 || columns < 1) return PORT_BAD_SIZE;
  const PortSplit split = port_split(rows, PORT_GRID);
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return with_width<T>(Width(columns).pointer(y).pointer(x), [&](auto size) {
      constexpr int V = size.value;
      return port_launch(stream, split.blocks, port_threads(columns / V), swiglu_forward<T, V>, (T *)y, (const T *)x,
                         rows, columns, split.each);
    });
  });
}

int pipert_swiglu_backward(void *dx, const void *dy, const void *x, int64_t rows, int64_t columns, int dtype,
                           void *stream) {
  if (rows < 0 || columns < 1) return PORT_BAD_SIZE;
  const PortSplit split = port_split(rows, PORT_GRID);
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return with_width<T>(Width(columns).pointer(dx).pointer(dy).pointer(x), [&](auto size) {
      constexpr int V = size.value;
      return port_launch(stream, split.blocks, port_threads(columns / V), swiglu_backward<T, V>, (T *)dx,
                         (const T *)dy, (const T *)x, rows, columns, split.each);
    });
  });
}
