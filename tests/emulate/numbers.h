// CUDA's words and its functions of numbers. Those that CUDA itself calls approximate are as exact here as their names allow.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "half.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

inline float __int_as_float(int32_t x) { return emulate::as_float(static_cast<uint32_t>(x)); }
inline float __uint_as_float(uint32_t x) { return emulate::as_float(x); }
inline uint32_t __float_as_uint(float x) { return emulate::bits_of(x); }
inline int32_t __float_as_int(float x) { return static_cast<int32_t>(emulate::bits_of(x)); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(int32_t x) { return __builtin_ffs(x); }
inline int __clz(int32_t x) { return x ? __builtin_clz(static_cast<uint32_t>(x)) : 32; }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
    const uint64_t both = uint64_t{b} << 32 | a;
    uint32_t found = 0;
    for (int i = 0; i < 4; i++) found |= static_cast<uint32_t>(both >> 8 * (select >> 4 * i & 7) & 0xFF) << 8 * i;
    return found;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rd(float a, float b) {
    const double exact = double{a} + b;  // of what is not too far apart
    const float x = static_cast<float>(exact);
    return x > exact ? std::nextafter(x, -INFINITY) : x;
}
inline float __fdividef(float a, float b) { return a / b; }
inline int32_t __float2int_rn(float x) {
    return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : static_cast<int32_t>(std::nearbyint(x));
}

namespace emulate {
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }  // .ftz
}
inline float __expf(float x) { return emulate::flushed(std::exp2(emulate::flushed(x * 1.44269504088896341f))); }
inline float __logf(float x) { return std::log(x); }

template <class A, class B>
auto min(A a, B b) {
    using T = decltype(a + b);
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
template <class A, class B>
auto max(A a, B b) {
    using T = decltype(a + b);
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
