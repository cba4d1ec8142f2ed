// What memory holds: float, bfloat16 or half. Arithmetic is in float.
#pragma once

#include "port.h"

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

PORT_DEVICE uint32_t bits_of(float x) {
#if defined(__CUDACC__)
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}

PORT_DEVICE float float_of(uint32_t bits) {
#if defined(__CUDACC__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

PORT_DEVICE float widen(float x) { return x; }
PORT_DEVICE float widen(bf16 x) { return float_of((uint32_t)x.bits << 16); }

PORT_DEVICE void narrow(float x, float &out) { out = x; }

// Round to nearest even; NaN stays NaN.
PORT_DEVICE void narrow(float x, bf16 &out) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out.bits = (uint16_t)(x != x ? 0x7fc0u : rounded);
}

#if defined(__CUDACC__)
PORT_DEVICE float widen(fp16 x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
PORT_DEVICE void narrow(float x, fp16 &out) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x)); }
#elif PORT_GPU
PORT_DEVICE float widen(fp16 x) { return (float)__builtin_bit_cast(_Float16, x.bits); }
PORT_DEVICE void narrow(float x, fp16 &out) { out.bits = __builtin_bit_cast(uint16_t, (_Float16)x); }
#else
// In integer arithmetic and without branches, so that loops with it become vector loops on every CPU.
PORT_DEVICE float widen(fp16 x) {
  const uint32_t magnitude = (uint32_t)(x.bits & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & 0x0f800000u;
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t special = magnitude + (224u << 23);
  const float subnormal = float_of(magnitude + (113u << 23)) - float_of(113u << 23);
  const uint32_t wide = exponent == 0x0f800000u ? special : exponent == 0 ? bits_of(subnormal) : normal;
  return float_of(wide | (uint32_t)(x.bits & 0x8000u) << 16);
}
PORT_DEVICE void narrow(float x, fp16 &out) {
  const uint32_t bits = bits_of(x), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t half = magnitude >= 0x47800000u ? special : magnitude < 0x38800000u ? subnormal : normal;
  out.bits = (uint16_t)(half | sign >> 16);
}
#endif
