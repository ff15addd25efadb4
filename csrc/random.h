// Dropout masks on the CPU: philox.h for 128 elements at a time.
#pragma once
#include "philox.h"
#include "simd.h"

namespace {

constexpr int BLOCK = 128;  // elements whose bits are drawn together: 16 counters of 8

// the high and the low words of 16 products of 32 bits
MC_INLINE void multiply(vu a, uint32_t m, vu& high, vu& low) {
    low = a * m;
#if defined(__AVX512F__)
    const __m512i x = reinterpret_cast<__m512i>(a), y = _mm512_set1_epi32(static_cast<int32_t>(m));
    const __m512i even = _mm512_mul_epu32(x, y), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), y);
    high = reinterpret_cast<vu>(_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd));
#elif defined(__AVX2__)
    const __m256i y = _mm256_set1_epi32(static_cast<int32_t>(m));
    high = by_parts<pu, pu>(a, a, [y](pu part, pu) {
        const __m256i x = reinterpret_cast<__m256i>(part);
        const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
        return reinterpret_cast<pu>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA));
    });
#elif defined(__SSE2__)
    const __m128i y = _mm_set1_epi32(static_cast<int32_t>(m)), upper = _mm_set_epi32(-1, 0, -1, 0);
    high = by_parts<pu, pu>(a, a, [y, upper](pu part, pu) {
        const __m128i x = reinterpret_cast<__m128i>(part);
        const __m128i even = _mm_mul_epu32(x, y), odd = _mm_mul_epu32(_mm_srli_epi64(x, 32), y);
        return reinterpret_cast<pu>(_mm_or_si128(_mm_srli_epi64(even, 32), _mm_and_si128(odd, upper)));
    });
#else
    high = by_parts<pu, pu>(a, a, [m](pu part, pu) {
        for (int i = 0; i < PART; i++) part[i] = static_cast<uint32_t>(uint64_t{part[i]} * m >> 32);
        return part;
    });
#endif
}

// philox.h for 16 counters: `a` and `b` are their halves, `c` and `d` zeros; then each has its words
MC_INLINE void philox(vu& a, vu& b, vu& c, vu& d, uint64_t seed) {
    uint32_t k = static_cast<uint32_t>(seed), l = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 7
    for (int round = 0; round < 7; round++) {
        vu ph, pl, qh, ql;
        multiply(a, 0xD2511F53u, ph, pl);
        multiply(c, 0xCD9E8D57u, qh, ql);
        a = qh ^ b ^ k, b = ql;
        c = ph ^ d ^ l, d = pl;
        k += 0x9E3779B9u, l += 0xBB67AE85u;
    }
}

// Four vectors of words, lane 4 i + j being of counter 4 j + i, to the words of counter after counter: those that belong together
// meet by exchanges within groups of four lanes.
#define MC_COUNTERS {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15}
MC_INLINE void by_counter(vu out[4], vu a, vu b, vu c, vu d) {
    const vu ab = of_fours<0, 4, 1, 5>(a, b), cd = of_fours<0, 4, 1, 5>(c, d);
    const vu ef = of_fours<2, 6, 3, 7>(a, b), gh = of_fours<2, 6, 3, 7>(c, d);
    out[0] = of_fours<0, 1, 4, 5>(ab, cd), out[1] = of_fours<2, 3, 6, 7>(ab, cd);
    out[2] = of_fours<0, 1, 4, 5>(ef, gh), out[3] = of_fours<2, 3, 6, 7>(ef, gh);
}

// The 16 random bits of each of the elements [128 block, 128 block + 128).
MC_NOINLINE void draw(uint16_t* random, uint64_t block, uint64_t seed) {
    const vu order = MC_COUNTERS;
    const uint64_t counter = block * 16;  // its low half does not overflow within a block
    vu a = order + static_cast<uint32_t>(counter), b = vu{} + static_cast<uint32_t>(counter >> 32), c{}, d{}, words[4];
    philox(a, b, c, d, seed);
    by_counter(words, a, b, c, d);
    auto* to = reinterpret_cast<uint32_t*>(random);  // the low half of a word first, as on every machine that this is built for
    for (int i = 0; i < 4; i++) store(to + i * LANES, words[i]);
}

// x where the element is kept, 0 where it is dropped
MC_INLINE vf masked(vf x, const uint16_t* random, uint32_t threshold) {
    const auto dropped = static_cast<int32_t>(threshold);
    return choose<pi>(load(random), x, vf{}, [=](pi r) { return r >= dropped; });
}

}  // namespace
