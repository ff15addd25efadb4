// Vectors of 16 floats for the CPU kernels: one source for every instruction set.
// Everything is in an anonymous namespace: no function compiled for one processor may be linked where another runs it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "kernel.h"

#define MC_INLINE inline __attribute__((always_inline))
#define MC_NOINLINE inline __attribute__((noinline))  // of much code and many callers
#define MC_INLINED __attribute__((always_inline))     // of a lambda
#define MC_PART [=](int i) MC_INLINED                 // a function of the number of a part

namespace {

constexpr int LANES = 16;
#if defined(__AVX512F__)
constexpr int PART = 16;
#elif defined(__AVX2__)
constexpr int PART = 8;
#else
constexpr int PART = 4;
#endif
constexpr int PARTS = LANES / PART;
typedef float pf __attribute__((vector_size(4 * PART)));  // a part: a vector of the processor's own
typedef int32_t pi __attribute__((vector_size(4 * PART)));
typedef uint32_t pu __attribute__((vector_size(4 * PART)));
typedef uint16_t ph __attribute__((vector_size(2 * PART)));
typedef float pf_any __attribute__((vector_size(4 * PART), aligned(4), may_alias));
typedef uint16_t ph_any __attribute__((vector_size(2 * PART), aligned(2), may_alias));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef uint16_t vh_any __attribute__((vector_size(32), aligned(2), may_alias));

// Of vectors wider than the processor's own compilers keep each in memory that outlives a statement, and compare them one element
// after the other. So there they are parts, each in a register: V::of(f) is made of f(0), f(1), ...
#if !defined(__AVX512F__)
template <class P, class E>
struct Wide {
    typedef P Part;
    P at[PARTS];
    template <class F>
    static MC_INLINE Wide of(F f) {
        static_assert(PARTS == 2 || PARTS == 4);
        if constexpr (PARTS == 2) return {{f(0), f(1)}};
        else return {{f(0), f(1), f(2), f(3)}};
    }
    MC_INLINE E operator[](int i) const { return at[i / PART][i % PART]; }
#define MC_OPERATOR(op)                                                                                         \
    friend MC_INLINE Wide operator op(Wide a, Wide b) { return of(MC_PART { return a.at[i] op b.at[i]; }); }    \
    friend MC_INLINE Wide operator op(Wide a, E b) { return of(MC_PART { return a.at[i] op b; }); }             \
    friend MC_INLINE Wide operator op(E a, Wide b) { return of(MC_PART { return a op b.at[i]; }); }             \
    MC_INLINE Wide& operator op##=(Wide b) { return *this = *this op b; }                                       \
    MC_INLINE Wide& operator op##=(E b) { return *this = *this op b; }
    MC_OPERATOR(+) MC_OPERATOR(-) MC_OPERATOR(*) MC_OPERATOR(/) MC_OPERATOR(&) MC_OPERATOR(|) MC_OPERATOR(^)
#undef MC_OPERATOR
    friend MC_INLINE Wide operator-(Wide a) { return of(MC_PART { return -a.at[i]; }); }
    friend MC_INLINE Wide operator>>(Wide a, int n) { return of(MC_PART { return a.at[i] >> n; }); }
    friend MC_INLINE Wide operator<<(Wide a, int n) { return of(MC_PART { return a.at[i] << n; }); }
};
typedef Wide<pf, float> vf;
typedef Wide<pi, int32_t> vi;
typedef Wide<pu, uint32_t> vu;
template <class V, class F>
MC_INLINE V of_parts(F f) {
    return V::of(f);
}
template <class P, class V>
MC_INLINE P part(const V& x, int i) {  // number i, as a vector of P
    return reinterpret_cast<P>(x.at[i]);
}
template <class V, class X>
MC_INLINE V as(X x) {  // the same bits
    return V::of(MC_PART { return reinterpret_cast<typename V::Part>(x.at[i]); });
}
#else
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
template <class V, class F>
MC_INLINE V of_parts(F f) {
    return reinterpret_cast<V>(f(0));
}
template <class P, class V>
MC_INLINE P part(const V& x, int) {
    return reinterpret_cast<P>(x);
}
template <class V, class X>
MC_INLINE V as(X x) {
    return reinterpret_cast<V>(x);
}
#endif

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

MC_INLINE vf all(float x) { return x - vf{}; }  // x + 0 would be an addition, for the sake of -0
MC_INLINE vf bits_to_float(vu x) { return as<vf>(x); }
MC_INLINE vu float_to_bits(vf x) { return as<vu>(x); }
MC_INLINE vf vabs(vf x) { return bits_to_float(float_to_bits(x) & 0x7FFFFFFFu); }
MC_INLINE vf whole_numbers(vi x) { return of_parts<vf>(MC_PART { return __builtin_convertvector(part<pi>(x, i), pf); }); }
MC_INLINE vi truncated(vf x) { return of_parts<vi>(MC_PART { return __builtin_convertvector(part<pf>(x, i), pi); }); }

// ---- choices by comparison

// f(part of a, part of b), parts being vectors of P and Q
template <class P, class Q, class A, class B, class F>
MC_INLINE A by_parts(A a, B b, F f) {
    return of_parts<A>(MC_PART { return f(part<P>(a, i), part<Q>(b, i)); });
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
    return of_parts<vf>(MC_PART { return f(part<P>(x, i)) ? part<pf>(a, i) : part<pf>(b, i); });
}
MC_INLINE vf only(vf x, int n, float rest) {  // the first n lanes of x
    vi lane = of_parts<vi>([](int i) MC_INLINED {
        pi number;
#pragma GCC unroll 16
        for (int l = 0; l < PART; l++) number[l] = i * PART + l;
        return number;
    });
    return choose<pi>(lane, x, all(rest), [=](pi l) { return l < n; });
}

// ---- exchanges of elements

// Of the elements of a and b, counted on from those of a, number f(l) in place l
template <class P, class F>
MC_INLINE P picked(P a, P b, F f) {
    pi lanes;
#pragma GCC unroll 16
    for (int l = 0; l < PART; l++) lanes[l] = f(l);
#if defined(__clang__)
    P out = a;
    for (int l = 0; l < PART; l++) out[l] = lanes[l] < PART ? a[lanes[l]] : b[lanes[l] - PART];
    return out;
#else
    return __builtin_shuffle(a, b, lanes);
#endif
}
// Of every four elements of a, 0 to 3, and the four of b in their place, 4 to 7
template <int FIRST, int SECOND, int THIRD, int FOURTH>
MC_INLINE vu of_fours(vu a, vu b) {
    return by_parts<pu, pu>(a, b, [](pu x, pu y) {
        return picked(x, y, [](int l) {
            const int from = l % 4 == 0 ? FIRST : l % 4 == 1 ? SECOND : l % 4 == 2 ? THIRD : FOURTH;
            return from < 4 ? l - l % 4 + from : PART + l - l % 4 + from - 4;
        });
    });
}
template <int ODD>
MC_INLINE vf every_other(vf a, vf b) {  // of the 32 elements of both, from number ODD on
    return of_parts<vf>(MC_PART {
        const int first = 2 * i % PARTS, second = (2 * i + 1) % PARTS;
        return picked(part<pf>(2 * i < PARTS ? a : b, first), part<pf>(2 * i + 1 < PARTS ? a : b, second),
                      [](int l) { return 2 * l + ODD; });
    });
}
template <int HIGH>
MC_INLINE vf interleaved(vf a, vf b) {  // the low, or the high, eight of a and of b in turn
    return of_parts<vf>(MC_PART {
        const int half = HIGH * PARTS + i;
        return picked(part<pf>(a, half / 2), part<pf>(b, half / 2),
                      [=](int l) { return half % 2 * (PART / 2) + l / 2 + l % 2 * PART; });
    });
}

// ---- 16 elements in and out; the rest of a row (fewer than 16) by load_some and store_some, the other lanes being `fill`

MC_INLINE vf load(const float* p) { return of_parts<vf>(MC_PART { return pf(reinterpret_cast<const pf_any*>(p)[i]); }); }
MC_INLINE void store(float* p, vf x) {
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) reinterpret_cast<pf_any*>(p)[i] = part<pf>(x, i);
}
MC_INLINE void store(uint32_t* p, vu x) { store(reinterpret_cast<float*>(p), as<vf>(x)); }

MC_INLINE vu load(const uint16_t* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return of_parts<vu>(MC_PART {
        return reinterpret_cast<pu>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i)));
    });
#elif defined(__SSE2__) && !defined(__AVX512F__)
    return of_parts<vu>(MC_PART {
        const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i / 2), zero = _mm_setzero_si128();
        return reinterpret_cast<pu>(i % 2 ? _mm_unpackhi_epi16(eight, zero) : _mm_unpacklo_epi16(eight, zero));
    });
#else
    return of_parts<vu>(MC_PART { return __builtin_convertvector(reinterpret_cast<const ph_any*>(p)[i], pu); });
#endif
}
MC_INLINE vh narrow(vu x) {  // of numbers below 2^16
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i both = _mm256_packus_epi32(reinterpret_cast<__m256i>(part<pu>(x, 0)), reinterpret_cast<__m256i>(part<pu>(x, 1)));
    return reinterpret_cast<vh>(_mm256_permute4x64_epi64(both, 0xD8));
#else
    union {
        vh all;
        ph at[PARTS];
#if defined(__SSE2__)
        __m128i eight[2];
#endif
    } made;
#if defined(__SSE2__) && !defined(__AVX512F__)
    for (int i = 0; i < 2; i++) {  // packed as numbers with a sign are
        const auto low = [](pu x) { return _mm_srai_epi32(_mm_slli_epi32(reinterpret_cast<__m128i>(x), 16), 16); };
        made.eight[i] = _mm_packs_epi32(low(part<pu>(x, 2 * i)), low(part<pu>(x, 2 * i + 1)));
    }
#else
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) made.at[i] = __builtin_convertvector(part<pu>(x, i), ph);
#endif
    return made.all;
#endif
}

MC_INLINE vf load(const bf16* p) { return bits_to_float(load(&p->bits) << 16); }
MC_INLINE vh round_bf16(vf x) {  // to nearest, ties to even; NaN stays NaN
    return narrow(as<vu>(by_parts<pf, pf>(x, x, [](pf x, pf) {
        const pu u = reinterpret_cast<pu>(x), rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16, nan = (u >> 16) | 0x40u;
        return reinterpret_cast<pf>(x != x ? nan : rounded);
    })));
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
    return of_parts<vf>(MC_PART {
        return reinterpret_cast<pf>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i)));
    });
}
MC_INLINE void store(fp16* p, vf x) {
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + i,
                         _mm256_cvtps_ph(reinterpret_cast<__m256>(part<pf>(x, i)), _MM_FROUND_TO_NEAREST_INT));
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
    float x[LANES];
    for (int i = 0; i < LANES; i++) x[i] = half_to_float(p[i].bits);
    return load(x);
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
    return of_parts<vf>(MC_PART {
        const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i));
        const __m256i wide = static_cast<T>(-1) < 0 ? _mm256_cvtepi8_epi32(eight) : _mm256_cvtepu8_epi32(eight);
        return reinterpret_cast<pf>(_mm256_cvtepi32_ps(wide));
    });
}
MC_INLINE vf load(const int8_t* p) { return load_bytes(p); }
MC_INLINE vf load(const uint8_t* p) { return load_bytes(p); }
#else
template <class T>
MC_INLINE vf load_bytes(const T* p) {
    float x[LANES];
    for (int i = 0; i < LANES; i++) x[i] = p[i];
    return load(x);
}
MC_INLINE vf load(const int8_t* p) { return load_bytes(p); }
MC_INLINE vf load(const uint8_t* p) { return load_bytes(p); }
#endif

// The lowest byte of each.
MC_INLINE void store(uint8_t* p, vi x) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
#elif defined(__AVX2__)
    const __m256i both = reinterpret_cast<__m256i>(narrow(as<vu>(x) & 0xFFu));
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
#else
    uint32_t at[LANES];
    store(at, as<vu>(x));
    for (int i = 0; i < LANES; i++) p[i] = static_cast<uint8_t>(at[i]);
#endif
}

template <class T>
MC_INLINE vf load_some(const T* p, int64_t n, float fill = 0) {
    T buffer[LANES] = {};
    memcpy(buffer, p, n * sizeof(T));
    return fill != 0 ? only(load(buffer), static_cast<int>(n), fill) : load(buffer);
}
template <class T, class V>
MC_INLINE void store_some(T* p, V x, int64_t n) {
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
template <class T, class V>
MC_INLINE void store_n(T* p, V x, int n) {
    n == LANES ? store(p, x) : store_some(p, x, n);
}

// ---- sums and functions

MC_INLINE float sum(vf x) {  // halves onto halves: four additions that wait for each other, not sixteen
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#elif defined(__AVX2__)
    const __m256 all = reinterpret_cast<__m256>(part<pf>(x, 0) + part<pf>(x, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float at[LANES];
    store(at, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) at[i] += at[i + half];
    return at[0];
#endif
}
MC_INLINE float largest(vf x) {
    float at[LANES], most;
    store(at, x), most = at[0];
    for (int i = 1; i < LANES; i++) most = at[i] > most ? at[i] : most;
    return most;
}

// Magnitudes compare as their bits do, and a NaN is then above all.
MC_INLINE vi higher(vi a, vi b) {
    return by_parts<pi, pi>(a, b, [](pi x, pi y) { return x > y ? x : y; });
}
MC_INLINE float highest(vi magnitudes) {
    uint32_t at[LANES], most = 0;
    store(at, as<vu>(magnitudes));
    for (int i = 0; i < LANES; i++) most = at[i] > most ? at[i] : most;
    float found;
    memcpy(&found, &most, sizeof found);
    return found;
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
    MC_INLINE vf whole() const {  // beside an infinity there is no rest
        return choose<pf>(rest - rest, sum + rest, sum, [](pf none) { return none == 0.0f; });
    }
};

// e^x = 2^n e^r, and e^r = 1 + r + r^2 p to 1 unit in the last place (Cephes' reduction and a polynomial of degree 6)
struct Exponent {
    vf shifted, n, r, p;  // shifted: n plus 1.5 * 2^23, which rounds to an integer in the low bits
    explicit MC_INLINE Exponent(vf x) {
        shifted = x * 1.44269504088896341f + 12582912.0f, n = shifted - 12582912.0f;
        r = x - n * 0.693359375f;
        r = r + n * 2.12194440e-4f;
        p = all(1.9875691500e-4f);
        p = p * r + 1.3981999507e-3f;
        p = p * r + 8.3334519073e-3f;
        p = p * r + 4.1665795894e-2f;
        p = p * r + 1.6666665459e-1f;
        p = p * r + 5.0000001201e-1f;
    }
};
// e^x to 1 unit in the last place between -87.3 and 88.7; 0 below, inf above
MC_INLINE vf vexp(vf x) {
    const Exponent e(vmin(vmax(x, all(-87.5f)), all(88.8f)));
    vf p = e.p * e.r * e.r + e.r + 1.0f;
    const vi whole = as<vi>(float_to_bits(e.shifted) - 0x4B400000u);  // n as an integer
    const vi low = whole >> 1, high = whole - low;                  // in two steps: 2^128 is no float
    p = p * as<vf>((low + 127) << 23) * as<vf>((high + 127) << 23);
    return unless_nan(x, p);
}

}  // namespace
