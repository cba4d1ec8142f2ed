/* Arithmetic: in rank order; floats narrower than fp32 in fp32 and rounded once. */

#include <string.h>

#include "standin.h"

static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

size_t size_of(ncclDataType_t type) { return (unsigned)type <= ncclBfloat16 ? SIZES[type] : 0; }

static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_fp16(uint16_t bits) {
    _Float16 value;
    memcpy(&value, &bits, sizeof value);
    return (float)value;
}

static uint16_t to_fp16(float value) {
    _Float16 narrow = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    return bits;
}

#define SAME(x) (x)
#define LOOP(stored, wide, widen, narrow)                                        \
    for (size_t i = 0; i < count; i++) {                                         \
        wide total = (wide)widen(((const stored *)rows[0])[i]);                  \
        for (int row = 1; row < count_rows; row++) {                             \
            wide next = (wide)widen(((const stored *)rows[row])[i]);             \
            if (op == ncclSum) total += next;                                    \
            if (op == ncclProd) total *= next;                                   \
            if (op == ncclMax && next > total) total = next;                     \
            if (op == ncclMin && next < total) total = next;                     \
        }                                                                        \
        ((stored *)to)[i] = (stored)narrow(total);                               \
    }                                                                            \
    return

void reduce(void *to, const void *const *rows, int count_rows, size_t count, ncclDataType_t type, ncclRedOp_t op) {
    switch (type) {
    case ncclInt8: LOOP(int8_t, int32_t, SAME, SAME);
    case ncclUint8: LOOP(uint8_t, uint32_t, SAME, SAME);
    case ncclInt32: LOOP(int32_t, int64_t, SAME, SAME);
    case ncclUint32: LOOP(uint32_t, uint64_t, SAME, SAME);
    case ncclInt64: LOOP(int64_t, int64_t, SAME, SAME);
    case ncclUint64: LOOP(uint64_t, uint64_t, SAME, SAME);
    case ncclFloat16: LOOP(uint16_t, float, from_fp16, to_fp16);
    case ncclFloat32: LOOP(float, float, SAME, SAME);
    case ncclFloat64: LOOP(double, double, SAME, SAME);
    case ncclBfloat16: LOOP(uint16_t, float, from_bf16, to_bf16);
    }
}
