// Roots and ratios on CUDA that have the bits of sqrtf and /.
#pragma once
#include "ptx.h"

namespace {

struct Plain {  // the compiler's own: a branch for rare operands follows each, so that one waits for another
    __device__ __forceinline__ float root(float x) const { return sqrtf(x); }
    __device__ __forceinline__ float ratio(float a, float b) const { return a / b; }
};

// Without a branch: approximated, then corrected by what is left over, which is exact (Markstein, 1990, "Computation of elementary
// functions on the IBM RISC System/6000 processor"); the operands are lifted so that it is never denormal.
struct Quick {
    __device__ __forceinline__ float root(float x) const {  // NaN unless 0 <= x < 2^64
        const float lifted = x * 0x1p64f, inverse = quick_inverse_root(lifted + 0x1p-126f), root = lifted * inverse;
        return __fmaf_rn(__fmaf_rn(-root, root, lifted), 0.5f * inverse, root) * 0x1p-32f;
    }
    // `b` from 2^-57 to 2^45; NaN unless |a| < 2^48. A ratio that is denormal, or zero, may be off in its last place or its sign.
    __device__ __forceinline__ float ratio(float a, float b) const { return divided(a * 0x1p80f, b * 0x1p80f, inverse(b * 0x1p80f)); }
    static __device__ __forceinline__ float inverse(float b) {
        const float about = quick_inverse(b);
        return __fmaf_rn(about, __fmaf_rn(-b, about, 1.0f), about);
    }
    static __device__ __forceinline__ float divided(float a, float b, float inverse) {
        const float about = a * inverse;
        return __fmaf_rn(inverse, __fmaf_rn(-b, about, a), about);
    }
};

}  // namespace
