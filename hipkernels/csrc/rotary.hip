// Rotary positions (Su et al. 2021), pairs half a head apart.
#include "values.h"

// Where rows lie: three nested loops.
struct Layout {
  int64_t b, c;                 // sizes of the inner two loops
  int64_t xa, xb, xc;           // strides
  int64_t ya, yb, yc;
  int64_t pa, pb, pc;           // steps of the position
};

template <class T, int V>
PORT_KERNEL(rotary, T *y, const T *x, const float *cosines, const float *sines, Layout layout, int64_t rows,
            int64_t each, int64_t half, int64_t width, float sign) {
  const int64_t begin = PORT_BLOCK * each, end = port_smaller(rows, begin + each);
  // A head is far shorter than a block, so the threads of a block share out all its rows at once.
  rows_each<V>(begin, end, width - half, [&](int64_t row, auto columns_each) {
    const int64_t a = row / (layout.b * layout.c), rest = row % (layout.b * layout.c);
    const int64_t b = rest / layout.c, c = rest % layout.c;
    const T *in = x + a * layout.xa + b * layout.xb + c * layout.xc;
    T *out = y + a * layout.ya + b * layout.yb + c * layout.yc;
    const int64_t table = (a * layout.pa + b * layout.pb + c * layout.pc) * half;
    columns_each(0, half, [&](int64_t i) {
      const auto left = load<V>(in + i), right = load<V>(in + half + i);
      const auto cosine = load<V>(cosines + table + i), sine = load<V>(sines + table + i) * sign;
      store(out + i, left * cosine - right * sine);
      store(out + half + i, right * cosine + left * sine);
    });
    columns_each(half, width - half, [&](int64_t i) { store(out + half + i, load<V>(in + half + i)); });
  });
}

int pipert_rotary(void *y, const void *x, const float *cosines, const float *sines, int64_t na, int64_t nb, int64_t nc,
                  int64_t xa, int64_t xb, int64_t xc, int64_t ya, int64_t yb, int64_t yc, int64_t pa, int64_t pb,
                  int64_t pc, int64_t half, int64_t width, int inverse, int dtype, void *stream) {
  if (na < 0 || nb < 0 || nc < 0 || half < 1 || 2 * half > width) return PORT_BAD_SIZE;
  const Layout layout = {nb, nc, xa, xb, xc, ya, yb, yc, pa, pb, pc};
  const int64_t rows = na * nb * nc;
  // At least as many elements a block as its threads take in a few steps.
  const PortSplit split = port_split(rows, port_smaller(PORT_GRID, port_ceil(rows * width, PORT_LEAST_CHUNK)));
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    Width lanes(half);
    lanes.pointer(y).pointer(x).pointer(cosines).pointer(sines);
    const int64_t strides[] = {width, xa, xb, xc, ya, yb, yc};
    for (const int64_t stride : strides)
      lanes.aligned = lanes.aligned && stride % Widest<T>::lanes == 0;
    return with_width<T>(lanes, [&](auto size) {
      return port_launch(stream, split.blocks, port_threads(256), rotary<T, size.value>, (T *)y, (const T *)x, cosines,
                         sines, layout, rows, split.each, half, width, inverse ? -1.0f : 1.0f);
    });
  });
}
