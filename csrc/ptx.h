// The instructions of a GPU that C++ has no name for. MC_EMULATED: what they do where csrc runs on a processor (tests/emulate).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace {

// 2^x, 1 / x and 1 / sqrt(x), 2 units in the last place off; where the result is denormal they say zero
__device__ __forceinline__ float quick_exp2(float x) {
#ifdef MC_EMULATED
    return emulate::flushed(exp2f(emulate::flushed(x)));
#else
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
#endif
}
__device__ __forceinline__ float quick_inverse(float x) {
#ifdef MC_EMULATED
    return emulate::flushed(1.0f / emulate::flushed(x));
#else
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
#endif
}
__device__ __forceinline__ float quick_inverse_root(float x) {
#ifdef MC_EMULATED
    return 1.0f / sqrtf(emulate::flushed(x));
#else
    float out;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
#endif
}

// 16 bytes of what passes through: they stay in the second cache longer than what is written, which so leaves it in longer runs (1 to
// 4 % of a pass). ALONE: they are left out of the first cache, which others need. WRITTEN: this kernel may write there afterwards.
template <bool ALONE = false, bool WRITTEN = false>
__device__ __forceinline__ uint4 read_passing(const uint4* from) {
#if !defined(MC_EMULATED) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint64_t last;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
    uint4 to;
    if (WRITTEN)
        asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "l"(from), "l"(last) : "memory");
    else if (ALONE)
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "l"(from), "l"(last));
    else
        asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "l"(from), "l"(last));
    return to;
#else
    return *from;
#endif
}
// 4 and 8 bytes, as above
__device__ __forceinline__ float read_passing(const float* from) {
#if !defined(MC_EMULATED) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint64_t last;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
    float to;
    asm volatile("ld.global.nc.L2::cache_hint.f32 %0, [%1], %2;" : "=f"(to) : "l"(from), "l"(last));
    return to;
#else
    return *from;
#endif
}
__device__ __forceinline__ uint2 read_passing(const uint2* from) {
#if !defined(MC_EMULATED) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint64_t last;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
    uint2 to;
    asm volatile("ld.global.nc.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;" : "=r"(to.x), "=r"(to.y) : "l"(from), "l"(last));
    return to;
#else
    return *from;
#endif
}

// what is read later is brought into the second cache
__device__ __forceinline__ void ahead(const void* from) {
#ifndef MC_EMULATED
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#endif
}

// `threads` of a block wait for each other at barrier `number`, 1 to 15; whole warps.
__device__ __forceinline__ void wait_for(int number, int threads) {
#ifdef MC_EMULATED
    emulate::barrier(number, threads);
#else
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
#endif
}

// 4, 8 or 16 bytes into shared memory, or zeros; some time before `wait`
template <class V, int BYTES = sizeof(V)>
__device__ __forceinline__ void copy_async(V* to, const void* from, bool exists) {
#ifdef MC_EMULATED
    emulate::copy_async(to, from, BYTES, exists ? BYTES : 0);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(exists ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(shared), "l"(from), "r"(exists ? BYTES : 0), "n"(BYTES) : "memory");
#else
    *to = exists ? *static_cast<const V*>(from) : V{};
#endif
}
// the copies since the last time are a group
__device__ __forceinline__ void commit() {
#ifdef MC_EMULATED
    emulate::commit_async();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// until no more than `newer` groups of copies are on their way; for 0 those of no group yet as well
__device__ __forceinline__ void wait(int newer) {
#ifdef MC_EMULATED
    emulate::wait_async(newer < 3 ? newer : 0);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if (newer == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
    else if (newer == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
    else asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace
