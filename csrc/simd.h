// Vectors of 16 floats for the CPU kernels, in the compiler's own vector types: one source for every instruction set.
// Everything is in an anonymous namespace: no function compiled for one processor may be linked where another runs it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "kernel.h"

#define MC_INLINE inline __attribute__((always_inline))
#define MC_NOINLINE inline __attribute__((noinline))  // of much code and many callers

namespace {

constexpr int LANES = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef float vf_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(32), aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

MC_INLINE vf all(float x) { return x - vf{}; }  // x + 0 would be an addition, for the sake of -0
MC_INLINE vf bits_to_float(vu x) { return reinterpret_cast<vf>(x); }
MC_INLINE vu float_to_bits(vf x) { return reinterpret_cast<vu>(x); }
MC_INLINE vf vabs(vf x) { return bits_to_float(float_to_bits(x) & 0x7FFFFFFFu); }

// ---- choices by comparison: of vectors wider than the processor's own, compilers make one of each element, so parts are compared

#if defined(__AVX512F__)
constexpr int PART = 16;
#elif defined(__AVX2__)
constexpr int PART = 8;
#else
constexpr int PART = 4;
#endif
typedef float pf __attribute__((vector_size(4 * PART)));
typedef int32_t pi __attribute__((vector_size(4 * PART)));
typedef uint32_t pu __attribute__((vector_size(4 * PART)));
template <class P>
union Parts {
    vu all;
    P at[LANES / PART];
};

// f(part of a, part of b), parts being vectors of P and Q
template <class P, class Q, class A, class B, class F>
MC_INLINE A by_parts(A a, B b, F f) {
    Parts<P> x = {reinterpret_cast<vu>(a)};
    const Parts<Q> y = {reinterpret_cast<vu>(b)};
#pragma GCC unroll 4
    for (int i = 0; i < LANES / PART; i++) x.at[i] = f(x.at[i], y.at[i]);
    return reinterpret_cast<A>(x.all);
}
MC_INLINE vf vmax(vf a, vf b) {
    return by_parts<pf, pf>(a, b, [](pf x, pf y) { return x > y ? x : y; });
}
MC_INLINE vf vmin(vf a, vf b) {
    return by_parts<pf, pf>(a, b, [](pf x, pf y) { return x < y ? x : y; });
}
MC_INLINE vf unless_nan(vf x, vf y) {  // y where x is a number, else x
    return by_parts<pf, pf>(x, y, [](pf x, pf y) { return x != x ? x : y; });
}
// a where f(part of x, a vector of P) holds, else b
template <class P, class X, class F>
MC_INLINE vf choose(X x, vf a, vf b, F f) {
    const Parts<P> given = {reinterpret_cast<vu>(x)};
    Parts<pf> yes = {reinterpret_cast<vu>(a)};
    const Parts<pf> no = {reinterpret_cast<vu>(b)};
#pragma GCC unroll 4
    for (int i = 0; i < LANES / PART; i++) yes.at[i] = f(given.at[i]) ? yes.at[i] : no.at[i];
    return reinterpret_cast<vf>(yes.all);
}

// Of the 32 elements of a and b those numbered by `lanes`, which are constants
template <class V>
MC_INLINE V pick(V a, V b, vi lanes) {
#if defined(__clang__)
    V out = a;
    for (int i = 0; i < LANES; i++) out[i] = lanes[i] < LANES ? a[lanes[i]] : b[lanes[i] - LANES];
    return out;
#else
    return __builtin_shuffle(a, b, lanes);
#endif
}

// ---- 16 elements in and out; the rest of a row (fewer than 16) by load_some and store_some, the other lanes being `fill`

MC_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
MC_INLINE void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }

MC_INLINE vf load(const bf16* p) {
    return bits_to_float(__builtin_convertvector(*reinterpret_cast<const vh_any*>(p), vu) << 16);
}
MC_INLINE vh round_bf16(vf x) {  // to nearest, ties to even; NaN stays NaN
    const vu u = float_to_bits(x);
    const vu rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    const vu nan = (u >> 16) | 0x40u;
#if defined(__AVX512F__)
    return __builtin_convertvector((u & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded, vh);
#else  // the same without a comparison
    const vu sick = reinterpret_cast<vu>(reinterpret_cast<vi>(0x7F800000u - (u & 0x7FFFFFFFu)) >> 31);
    return __builtin_convertvector(rounded ^ ((rounded ^ nan) & sick), vh);
#endif
}
MC_INLINE void store(bf16* p, vf x) { *reinterpret_cast<vh_any*>(p) = round_bf16(x); }

#if defined(__AVX512F__)
MC_INLINE vf load(const fp16* p) {
    return reinterpret_cast<vf>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
MC_INLINE void store(fp16* p, vf x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
MC_INLINE vf load(const fp16* p) {
    union {
        vf all;
        __m256 half[2];
    } u;
    for (int i = 0; i < 2; i++) u.half[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i));
    return u.all;
}
MC_INLINE void store(fp16* p, vf x) {
    union {
        vf all;
        __m256 half[2];
    } u = {x};
    for (int i = 0; i < 2; i++)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + i, _mm256_cvtps_ph(u.half[i], _MM_FROUND_TO_NEAREST_INT));
}
#else
MC_INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t{h} >> 15 << 31, e = h >> 10 & 31u, m = h & 1023u;
    if (e == 0) {  // zero and subnormals: m * 2^-24
        const float f = static_cast<float>(m) * 5.9604644775390625e-8f;
        return sign ? -f : f;
    }
    const uint32_t u = sign | (e == 31 ? 0x7F800000u | m << 13 : (e + 112) << 23 | m << 13);
    float f;
    memcpy(&f, &u, 4);
    return f;
}
MC_INLINE uint16_t float_to_half(float f) {  // to nearest, ties to even
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000u);
    u &= 0x7FFFFFFFu;
    if (u > 0x7F800000u) return sign | 0x7E00u;
    if (u >= 0x477FF000u) return sign | 0x7C00u;  // 65520 and more
    if (u < 0x38800000u) {                        // subnormal: adding 0.5 rounds to multiples of 2^-24
        float magnitude;
        memcpy(&magnitude, &u, 4);
        magnitude += 0.5f;
        memcpy(&u, &magnitude, 4);
        return sign | static_cast<uint16_t>(u - 0x3F000000u);
    }
    return sign | static_cast<uint16_t>((u - 0x38000000u + 0xFFFu + (u >> 13 & 1u)) >> 13);
}
MC_INLINE vf load(const fp16* p) {
    vf x;
    for (int i = 0; i < LANES; i++) x[i] = half_to_float(p[i].bits);
    return x;
}
MC_INLINE void store(fp16* p, vf x) {
    for (int i = 0; i < LANES; i++) p[i].bits = float_to_half(x[i]);
}
#endif

// Bytes; compilers widen a vector of them one by one
#if defined(__AVX512F__)
MC_INLINE __m128i bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
MC_INLINE vf load(const int8_t* p) { return reinterpret_cast<vf>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(p)))); }
MC_INLINE vf load(const uint8_t* p) { return reinterpret_cast<vf>(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes(p)))); }
#elif defined(__AVX2__)
template <class T>
MC_INLINE vf load_bytes(const T* p) {
    union {
        vf all;
        __m256 half[2];
    } u;
    for (int i = 0; i < 2; i++) {
        const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i));
        u.half[i] = _mm256_cvtepi32_ps(static_cast<T>(-1) < 0 ? _mm256_cvtepi8_epi32(eight) : _mm256_cvtepu8_epi32(eight));
    }
    return u.all;
}
MC_INLINE vf load(const int8_t* p) { return load_bytes(p); }
MC_INLINE vf load(const uint8_t* p) { return load_bytes(p); }
#else
typedef int8_t vb_any __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t vub_any __attribute__((vector_size(16), aligned(1), may_alias));
MC_INLINE vf load(const int8_t* p) { return __builtin_convertvector(*reinterpret_cast<const vb_any*>(p), vf); }
MC_INLINE vf load(const uint8_t* p) { return __builtin_convertvector(*reinterpret_cast<const vub_any*>(p), vf); }
#endif

template <class T>
MC_INLINE vf load_some(const T* p, int64_t n, float fill = 0) {
    T buffer[LANES] = {};
    memcpy(buffer, p, n * sizeof(T));
    vf x = load(buffer);
    if (fill != 0)
        for (int i = static_cast<int>(n); i < LANES; i++) x[i] = fill;
    return x;
}
template <class T>
MC_INLINE void store_some(T* p, vf x, int64_t n) {
    T buffer[LANES];
    store(buffer, x);
    memcpy(p, buffer, n * sizeof(T));
}

// f(offset, n) for every 16 of a row, n being 16 but for the last: the compiler makes two loops of it
template <class F>
MC_INLINE void each(int64_t dim, F f) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) f(i, LANES);
    if (i < dim) f(i, static_cast<int>(dim - i));
}
template <class T>
MC_INLINE vf load_n(const T* p, int n) {
    return n == LANES ? load(p) : load_some(p, n);
}
template <class T>
MC_INLINE void store_n(T* p, vf x, int n) {
    n == LANES ? store(p, x) : store_some(p, x, n);
}

// ---- sums and functions

MC_INLINE float sum(vf x) {  // halves onto halves: four additions that wait for each other, not sixteen
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#else
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
#endif
}
MC_INLINE float largest(vf x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

// A sum with what each addition has rounded off: as exact as one rounding (Knuth, "The Art of Computer Programming", volume 2, 4.2.2,
// theorem B).
struct Total {
    vf sum{}, rest{};
    MC_INLINE void add(vf x) {
        const vf next = sum + x, added = next - sum;
        rest += (sum - (next - added)) + (x - added);
        sum = next;
    }
    MC_INLINE vf whole() const { return rest - rest == 0.0f ? sum + rest : sum; }  // beside an infinity there is none
};

// e^x to 1 unit in the last place between -87.3 and 88.7; 0 below, inf above (Cephes' reduction and a polynomial of degree 6)
MC_INLINE vf vexp(vf x) {
    const vf clamped = vmin(vmax(x, all(-87.5f)), all(88.8f));
    const vf shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
    const vf n = shifted - 12582912.0f;
    vf r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const vu half = (float_to_bits(shifted) - 0x4B400000u);                 // n as an integer
    const vi low = reinterpret_cast<vi>(half) >> 1, high = reinterpret_cast<vi>(half) - low;  // in two steps: 2^128 is no float
    p = p * bits_to_float(reinterpret_cast<vu>(low + 127) << 23) * bits_to_float(reinterpret_cast<vu>(high + 127) << 23);
    return unless_nan(x, p);
}

}  // namespace
