// Rotary positions: pairs of channels turned by the angles of their token, forth or (`back`: the gradient) back.
//
// y is b s h d; cos and sin, (1|b) s 1 r/2, hold an angle for each pair of the first r channels; the others pass. Without an x the
// rotation is in place: every pair is read before it is written.
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
    const Array y = call.inout("y", FLOATS);
    if (y.shape.rank != 4) call.refuse("y: %d dimensions; wanted b s h d", y.shape.rank);
    const int64_t b = y.shape.at[0], s = y.shape.at[1], h = y.shape.at[2], d = y.shape.at[3];
    const Array x = call.maybe("x", y.dtype, y.shape);
    const Array cos = call.in("cos", F32);
    const int64_t pairs = cos.shape.last();
    if (cos.shape.at[0] != b && cos.shape.at[0] != 1) call.refuse("cos: for another batch than y");
    if (!(cos.shape == Shape{cos.shape.at[0], s, 1, pairs}) || 2 * pairs > d) call.refuse("cos: wanted (1|b) s 1 r/2, r being at most d");
    const Array sin = call.in("sin", F32, cos.shape);
    const bool interleaved = call.flag("interleaved"), back = call.flag("back");
    call.ready();
    const float way = back ? -1.0f : 1.0f;
    const int64_t period = cos.shape.at[0] == 1 ? s : b * s, row = h * d;
    MC_FOR_FLOAT(y.dtype, T, mc::parallel(b * s, (1 << 15) / (row + 1) + 1, [=](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) {
            const float *c = cos.as<float>() + token % period * pairs, *n = sin.as<float>() + token % period * pairs;
            for (int64_t head = 0; head < h; head++) {
                T* to = y.as<T>() + token * row + head * d;
                const T* from = x ? x.as<T>() + token * row + head * d : to;
                interleaved ? neighbours(from, to, c, n, pairs, way) : halves(from, to, c, n, pairs, way);
                if (from != to) memcpy(to + 2 * pairs, from + 2 * pairs, (d - 2 * pairs) * sizeof(T));
            }
        }
    }))
}
