// Rotary positions (rotary.h).
#include "rotary.h"
#include "simd.h"

namespace {

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
    each(pairs, [&](int64_t i, int n) {
        const int low = n < 8 ? 2 * n : LANES, high = 2 * n - low;
        const vf l = load_n(x + 2 * i, low), h = high ? load_n(x + 2 * i + LANES, high) : vf{};
        const vf a = every_other<0>(l, h), b = every_other<1>(l, h), c = load_n(cos + i, n), s = load_n(sin + i, n) * way;
        const vf p = a * c - b * s, q = b * c + a * s;
        store_n(y + 2 * i, interleaved<0>(p, q), low);
        if (high) store_n(y + 2 * i + LANES, interleaved<1>(p, q), high);
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
