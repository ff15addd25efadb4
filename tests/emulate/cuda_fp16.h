// Half precision.
#pragma once
#include "half.h"

struct __half {
    uint16_t bits;
};
struct alignas(4) __half2 {
    __half x, y;
};
inline float __half2float(__half x) { return emulate::fp16_value(x.bits); }
inline __half __float2half_rn(float x) { return {emulate::fp16_of(x)}; }
inline __half __float2half(float x) { return __float2half_rn(x); }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
