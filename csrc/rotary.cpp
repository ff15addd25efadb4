// Rotary positions (rotary.h).
#include "rotary.h"
#include "simd.h"

namespace {

MC_INLINE vf take(vf low, vf high, vi lanes) {  // of the 32 elements of both
#if defined(__AVX512F__)
    return reinterpret_cast<vf>(
        _mm512_permutex2var_ps(reinterpret_cast<__m512>(low), reinterpret_cast<__m512i>(lanes), reinterpret_cast<__m512>(high)));
#else
    return pick(low, high, lanes);
#endif
}

// one head of one token; `way` is 1 or -1
template <class T>
void halves(const T* x, T* y, const float* cos, const float* sin, int64_t pairs, float way) {
    each(pairs, [&](int64_t i, int n) {
        const vf c = load_n(cos + i, n), s = load_n(sin + i, n) * way, a = load_n(x + i, n), b = load_n(x + pairs + i, n);
        store_n(y + i, a * c - b * s, n);
        store_n(y + pairs + i, b * c + a * s, n);
    });
}
template <class T>
void neighbours(const T* x, T* y, const float* cos, const float* sin, int64_t pairs, float way) {
    const vi even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, odd = even + 1;
    const vi first = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, second = first + 8;
    each(pairs, [&](int64_t i, int n) {
        const int low = n < 8 ? 2 * n : LANES, high = 2 * n - low;
        const vf l = load_n(x + 2 * i, low), h = high ? load_n(x + 2 * i + LANES, high) : vf{};
        const vf a = take(l, h, even), b = take(l, h, odd), c = load_n(cos + i, n), s = load_n(sin + i, n) * way;
        const vf p = a * c - b * s, q = b * c + a * s;
        store_n(y + 2 * i, take(p, q, first), low);
        if (high) store_n(y + 2 * i + LANES, take(p, q, second), high);
    });
}

}  // namespace

MC_KERNEL(rotary) {
    const Rotary a(call);
    const int64_t row = a.heads * a.dim, turned = 2 * a.pairs;
    MC_FOR_FLOAT(a.y.dtype, T, mc::parallel(a.tokens, (1 << 15) / (row + 1) + 1, [=](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) {
            const int64_t angle = token % a.period * a.pairs;
            const float *cos = a.cos.as<float>() + angle, *sin = a.sin.as<float>() + angle;
            for (int64_t head = 0; head < a.heads; head++) {
                T* to = a.y.as<T>() + token * row + head * a.dim;
                const T* from = a.x ? a.x.as<T>() + token * row + head * a.dim : to;
                a.interleaved ? neighbours(from, to, cos, sin, a.pairs, a.way) : halves(from, to, cos, sin, a.pairs, a.way);
                if (from != to) memcpy(to + turned, from + turned, (a.dim - turned) * sizeof(T));
            }
        }
    }))
}
