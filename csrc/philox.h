// Counter-based random bits: Philox4x32 with 7 rounds (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3").
//
// Element e of a tensor takes 16 bits: half e % 8 of the four words of counter e / 8, keyed by the seed. The same bits on every
// device, so a dropout mask is never stored: forward, backward and recompute ask again.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define MC_BOTH __host__ __device__ __forceinline__
#else
#define MC_BOTH inline __attribute__((always_inline))
#endif

namespace {

struct Words {
    uint32_t w[4];
};

MC_BOTH uint32_t high_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    return __umulhi(a, b);  // of 64 bits nvcc makes more
#else
    return static_cast<uint32_t>(uint64_t{a} * b >> 32);
#endif
}

MC_BOTH Words philox(uint64_t counter, uint64_t seed) {
    uint32_t a = static_cast<uint32_t>(counter), b = static_cast<uint32_t>(counter >> 32), c = 0, d = 0;
    uint32_t k = static_cast<uint32_t>(seed), l = static_cast<uint32_t>(seed >> 32);
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int round = 0; round < 7; round++) {
        const uint32_t p = high_product(0xD2511F53u, a), q = high_product(0xCD9E8D57u, c);
        const uint32_t low = 0xD2511F53u * a;
        a = q ^ b ^ k, b = 0xCD9E8D57u * c;
        c = p ^ d ^ l, d = low;
        k += 0x9E3779B9u, l += 0xBB67AE85u;
    }
    return {{a, b, c, d}};
}

// How many of the 65536 values of an element's bits are dropped, and what those that are kept are multiplied by.
struct Rate {
    uint32_t threshold = 0;
    float scale = 1.0f;
    Rate() = default;
    explicit Rate(double p)
        : threshold(static_cast<uint32_t>(p * 65536 + 0.5)), scale(threshold >= 65536 ? 0.0f : 65536.0f / (65536 - threshold)) {}
};

// Is element e kept?
MC_BOTH bool kept(const Words& words, uint64_t e, uint32_t threshold) {
    return ((words.w[e % 8 / 2] >> (e % 2 * 16)) & 0xFFFFu) >= threshold;
}

}  // namespace
