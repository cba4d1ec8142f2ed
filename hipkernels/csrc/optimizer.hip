// What an optimizer step does over flat buffers: AdamW (Loshchilov and Hutter 2019), squared norms, scaling and casting.
#include "block.h"
#include "functions.h"

struct AdamW {
  float beta1, rest1, beta2, rest2, eps, keep, step_size, inverse_root;
};

template <class P, class G, int V>
PORT_KERNEL(adamw, P *param, float *master, float *average, float *square, const G *grad, int64_t n, int64_t each,
            AdamW o, const float *scale, const float *skip) {
  if (skip && *skip != 0.0f) return;
  const float factor = scale ? *scale : 1.0f;
  choose(param != nullptr, [&](auto has_param) {
    lanes_each<V>(PORT_BLOCK * each, port_smaller(n, (PORT_BLOCK + 1) * each), [&](int64_t i) {
      const auto g = load<V>(grad + i) * factor;
      const auto old = load<V>(average + i);
      // From the nearer end: with beta1 = 0 it is g to the last digit, however far the old one was.
      const auto m = o.rest1 < 0.5f ? old + (g - old) * o.rest1 : g + (old - g) * o.beta1;
      const auto v = load<V>(square + i) * o.beta2 + g * g * o.rest2;
      const auto step = map(m, v, [&](float a, float b) { return a / (port_sqrt(b) * o.inverse_root + o.eps); });
      const auto w = load<V>(master + i) * o.keep - step * o.step_size;
      store(average + i, m);
      store(square + i, v);
      store(master + i, w);
      if constexpr (has_param.value) store(param + i, w);
    });
  });
}

// A block's chunk: a stretch of one tensor.
template <class T>
PORT_KERNEL(squared_norm, double *workspace, const int64_t *table, int64_t chunks) {
  (void)chunks;
  const T *in = (const T *)(uintptr_t)table[2 * PORT_BLOCK];
  const int64_t n = table[2 * PORT_BLOCK + 1];
  double sum = 0.0;
#if PORT_ONE_THREAD
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += (double)widen(in[i]) * (double)widen(in[i]);
#else
  for (int64_t i = PORT_THREAD; i < n; i += PORT_THREADS) sum += (double)widen(in[i]) * (double)widen(in[i]);
#endif
  sum = block_sum(sum);
  if (PORT_THREAD == 0) workspace[PORT_BLOCK] = sum;
}

PORT_KERNEL(sum_of_chunks, double *result, const double *workspace, int64_t chunks) {
  double sum = 0.0;
  for (int64_t i = PORT_THREAD; i < chunks; i += PORT_THREADS) sum += workspace[i];
  sum = block_sum(sum);
  if (PORT_THREAD == 0) *result = sum;
}

template <class I, class O, int V>
PORT_KERNEL(scale_cast, O *out, const I *in, int64_t n, int64_t each, const float *scale, float factor,
            float *overflow) {
  const int64_t begin = PORT_BLOCK * each, end = port_smaller(n, begin + each);
  const float by = (scale ? *scale : 1.0f) * factor;

  const float worst = lanes_max<V>(begin, end, [&](int64_t i) {
    const auto value = load<V>(in + i) * by;
    store(out + i, value);
    return largest(map(value, [](float x) {
      O stored;
      narrow(x, stored);
      return (bits_of(widen(stored)) & 0x7f800000u) == 0x7f800000u ? 1.0f : 0.0f;
    }));
  });
  if (overflow) {
    const float any = block_max(worst);
    if (PORT_THREAD == 0 && any > 0.0f) port_raise(overflow);
  }
}

int pipert_adamw(void *param, float *master, float *average, float *square, const void *grad, int64_t n, double beta1,
                 double beta2, double eps, double decay, double step_size, double root, const float *scale,
                 const float *skip, int param_dtype, int grad_dtype, void *stream) {
  if (n < 0) return PORT_BAD_SIZE;
  // 1 - 0.999 and the like in double: float would lose five digits.
  const AdamW o = {(float)beta1, (float)(1.0 - beta1), (float)beta2,     (float)(1.0 - beta2),
                   (float)eps,   (float)(1.0 - decay), (float)step_size, (float)(1.0 / root)};
  const Chunks chunks = chunks_of(n);
  return with_dtype(param_dtype, [&](auto param_zero) {
    using P = decltype(param_zero);
    return with_dtype(grad_dtype, [&](auto grad_zero) {
      using G = decltype(grad_zero);
      const Width width = Width(n).pointer(param).pointer(master).pointer(average).pointer(square).pointer(grad);
      return with_width<float>(width, [&](auto size) {
        return port_launch(stream, chunks.blocks, chunks.threads, adamw<P, G, size.value>, (P *)param, master, average,
                           square, (const G *)grad, n, chunks.each, o, scale, skip);
      });
    });
  });
}

int pipert_squared_norm(double *result, double *workspace, const int64_t *table, int64_t chunks, int dtype,
                        void *stream) {
  if (chunks < 0) return PORT_BAD_SIZE;
  const int threads = port_threads(256);
  const int code = with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return port_launch(stream, chunks, threads, squared_norm<T>, workspace, table, chunks);
  });
  return code ? code : port_launch(stream, 1, threads, sum_of_chunks, result, workspace, chunks);
}

int pipert_scale_cast(void *out, const void *in, int64_t n, const float *scale, double factor, float *overflow,
                      int in_dtype, int out_dtype, void *stream) {
  if (n < 0) return PORT_BAD_SIZE;
  const Chunks chunks = chunks_of(n);
  return with_dtype(in_dtype, [&](auto in_zero) {
    using I = decltype(in_zero);
    return with_dtype(out_dtype, [&](auto out_zero) {
      using O = decltype(out_zero);
      return with_width<float>(Width(n).pointer(out).pointer(in), [&](auto size) {
        return port_launch(stream, chunks.blocks, chunks.threads, scale_cast<I, O, size.value>, (O *)out,
                           (const I *)in, n, chunks.each, scale, (float)factor, overflow);
      });
    });
  });
}
