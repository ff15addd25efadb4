// bf16 and fp16 as they are stored, and their conversions, an instruction each. (CUDA's headers of them take a compiler longer to read
// than most kernels here.) Rounded to nearest, ties to even; any NaN becomes 0x7FFF.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace {

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(uint32_t{x.bits} << 16); }
__device__ __forceinline__ float to_float(fp16 x) {
#ifdef MC_EMULATED
    return emulate::fp16_value(x.bits);
#else
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
    return out;
#endif
}

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 out;
#ifdef MC_EMULATED
    out.bits = emulate::bf16_of(x);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
#else
    const uint32_t all = __float_as_uint(x);
    out.bits = static_cast<uint16_t>(x != x ? 0x7FFFu : (all + 0x7FFFu + (all >> 16 & 1)) >> 16);
#endif
    return out;
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
    fp16 out;
#ifdef MC_EMULATED
    out.bits = emulate::fp16_of(x);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
#endif
    return out;
}

// Two numbers rounded, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack2(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(MC_EMULATED)
    uint32_t both;
    if constexpr (std::is_same_v<T, bf16>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
#else
    return from_float<T>(first).bits | static_cast<uint32_t>(from_float<T>(second).bits) << 16;
#endif
}

// Whether there are kernels for T on a chip. Before sm_80 bf16 is no chip's: ops leave it to their references there (ops/_op.py), and
// kernels that compute with it end at once, so that nothing is compiled that nobody calls.
#ifdef __NVCC__
#pragma nv_diag_suppress 128  // loops behind that end are not reached: as meant
#endif
template <class T>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool present = !std::is_same_v<T, bf16>;
#else
constexpr bool present = true;
#endif

}  // namespace
