// Rotary positions: pairs of channels turned by the angles of their token, forth or (`back`: the gradient) back.
//
// y is b s h d; cos and sin, (1|b) s 1 r/2, hold an angle for each pair of the first r channels; the others pass. Without an x the
// rotation is in place: every pair is read before it is written, by the thread that writes it. A thread takes eight pairs of four
// heads of a token, so that it reads their angles once.
#include "cuda.h"

namespace {

constexpr int HEADS = 4;

struct Sizes {
    int64_t tokens, heads, dim, pairs, period;  // period: tokens after which the angles begin anew
    int64_t packs, rests, groups;               // of a head: packs of 8 pairs, packs of 8 channels that pass; groups of 4 heads
    float way;                                  // 1, or -1: back
};

template <class T, bool INTERLEAVED, bool VECTOR>
__global__ __launch_bounds__(256) void rotate(const T* x, T* y, const float* cos, const float* sin, Sizes z) {
    const int64_t each = z.packs + z.rests, items = z.tokens * z.groups * each;
    for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < items; item += int64_t{gridDim.x} * blockDim.x) {
        const int64_t pack = item % each, group = item / each % z.groups, token = item / each / z.groups;
        const int64_t row = (token * z.heads + group * HEADS) * z.dim;
        const int heads = z.heads - group * HEADS < HEADS ? static_cast<int>(z.heads - group * HEADS) : HEADS;
        if (pack >= z.packs) {  // channels that pass
            const int64_t at = 2 * z.pairs + (pack - z.packs) * 8;
            const int count = z.dim - at < 8 ? static_cast<int>(z.dim - at) : 8;
            for (int head = 0; head < heads; head++)
                store8<VECTOR>(y + row + head * z.dim + at, load8<VECTOR>(x + row + head * z.dim + at, count), count);
            continue;
        }
        const int count = z.pairs - pack * 8 < 8 ? static_cast<int>(z.pairs - pack * 8) : 8;
        const int64_t angle = token % z.period * z.pairs + pack * 8;
        const Pack<float> c = load8<VECTOR>(cos + angle, count), s = load8<VECTOR>(sin + angle, count);
        // where the eight first and the eight second of a pair stand, or the first eight and the next eight neighbours
        const int64_t one = row + (INTERLEAVED ? 2 : 1) * pack * 8, two = INTERLEAVED ? one + 8 : one + z.pairs;
        const int low = !INTERLEAVED ? count : count < 4 ? 2 * count : 8, high = INTERLEAVED ? 2 * count - low : count;
        Pack<T> a[HEADS], b[HEADS];
#pragma unroll
        for (int head = 0; head < HEADS; head++)
            if (head < heads) {
                a[head] = load8<VECTOR>(x + one + head * z.dim, low);
                b[head] = load8<VECTOR>(x + two + head * z.dim, high);
            }
#pragma unroll
        for (int head = 0; head < HEADS; head++)
            if (head < heads) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    T& p = !INTERLEAVED ? a[head].at[i] : i < 4 ? a[head].at[2 * i % 8] : b[head].at[2 * i % 8];
                    T& q = !INTERLEAVED ? b[head].at[i] : i < 4 ? a[head].at[(2 * i + 1) % 8] : b[head].at[(2 * i + 1) % 8];
                    const float u = to_float(p), v = to_float(q), turn = s.at[i] * z.way;
                    p = from_float<T>(u * c.at[i] - v * turn);
                    q = from_float<T>(v * c.at[i] + u * turn);
                }
                store8<VECTOR>(y + one + head * z.dim, a[head], low);
                store8<VECTOR>(y + two + head * z.dim, b[head], high);
            }
    }
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
    const int64_t rest = x ? (d - 2 * pairs + 7) / 8 : 0;
    const Sizes sizes{b * s, h, d, pairs, cos.shape.at[0] == 1 ? s : b * s, (pairs + 7) / 8, rest, (h + HEADS - 1) / HEADS,
                      back ? -1.0f : 1.0f};
    const int64_t items = sizes.tokens * sizes.groups * (sizes.packs + sizes.rests);
    if (!items) return;
    const Array& from = x ? x : y;
    const bool vector = from.aligned() && y.aligned() && cos.aligned() && sin.aligned() && d % 8 == 0 && pairs % 8 == 0;
    const int blocks = grid(items, 256, 64);
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(y.dtype, T, MC_FOR_BOOL(interleaved, INTERLEAVED, MC_FOR_BOOL(vector, VECTOR,
        rotate<T, INTERLEAVED, VECTOR><<<blocks, 256, 0, stream>>>(from.as<T>(), y.as<T>(), cos.as<float>(), sin.as<float>(), sizes))))
}
