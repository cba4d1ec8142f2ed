// Elementary functions in float: on GPUs the device's own, on the CPU polynomials that become vector instructions under
// flags that keep IEEE arithmetic (never -ffast-math: it would flush subnormals to zero in the whole process).
#pragma once

#include "values.h"

// e^x to 2 ulp. Below -87 the result is 0 (it would be at most 1.6e-38), above 88.73 infinity, NaN for NaN.
PORT_DEVICE float port_exp(float x) {
#if PORT_GPU
  return expf(x);
#else
  // x = n ln 2 + r with |r| <= ln(2) / 2, in two parts of ln 2; the minimax polynomial of e^r has relative error 2e-9.
  const float clamped = x < -87.0f ? -87.0f : x > 89.0f ? 89.0f : x;
  const float n = __builtin_rintf(clamped * 1.44269504f);
  float r = __builtin_fmaf(n, -0.693359375f, clamped);
  r = __builtin_fmaf(n, 2.12194440e-4f, r);
  float p = 1.3836831785e-3f;
  p = __builtin_fmaf(p, r, 8.3748241886e-3f);
  p = __builtin_fmaf(p, r, 4.1668225080e-2f);
  p = __builtin_fmaf(p, r, 1.6666419804e-1f);
  p = __builtin_fmaf(p, r, 4.9999991059e-1f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  // 2^n as 2 * 2^(n - 1): n may be 128. A NaN's n is no number; p is NaN and stays it.
  const float scaled = (p + p) * float_of((uint32_t)((int32_t)n + 126) << 23);
  return x < -87.0f ? 0.0f : scaled;
#endif
}

PORT_DEVICE float port_log(float x) {
#if PORT_GPU
  return logf(x);
#else
  return __builtin_logf(x);
#endif
}

PORT_DEVICE float port_sqrt(float x) {
#if PORT_GPU
  return sqrtf(x);
#else
  return __builtin_sqrtf(x);
#endif
}

PORT_DEVICE float port_abs(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

// 1 / (1 + e^-x)
PORT_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + port_exp(-x)); }

struct ValueSlope {
  float value, slope;
};

// GELU x * Phi(x) and its derivative Phi(x) + x * phi(x) (Hendrycks and Gimpel 2016), Phi from
// Phi(-z) = e^(-z^2 / 2) * P(1 / (1 + 0.26 z)) for z >= 0, P a polynomial of degree 7 fitted to relative error 2.9e-7.
PORT_DEVICE ValueSlope gelu_erf(float x) {
  const float z = port_abs(x);
  const float e = port_exp(-0.5f * x * x);
  const float t = 1.0f / (1.0f + 0.26f * z);
  float p = -0.07566291093826294f;
  p = p * t + 0.2393166571855545f;
  p = p * t - 0.1224203109741211f;
  p = p * t + 0.17911431193351746f;
  p = p * t + 0.06786508113145828f;
  p = p * t + 0.10837482661008835f;
  p = p * t + 0.1034122109413147f;
  const float tail = e * (p * t);
  const float cdf = x > 0.0f ? 1.0f - tail : tail;
  return ValueSlope{x * cdf, cdf + x * (0.3989422804f * e)};
}

// GELU by tanh: 0.5 x (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
PORT_DEVICE ValueSlope gelu_tanh(float x) {
  const float square = x * x;
  const float twice = x * (1.5957691216f + 0.0713548162f * square);
  const float s = sigmoid(twice);
  const float slope = 1.5957691216f + 0.2140644488f * square;
  return ValueSlope{x * s, s + x * s * (1.0f - s) * slope};
}
