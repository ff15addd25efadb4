// Rotary positions (rotary.h). A pair is read and written by one thread, which takes the same pairs of several heads of a token, so that
// it reads their angles once.
#include "cuda.h"
#include "ptx.h"
#include "rotary.h"

namespace {

constexpr int THREADS = 128;
// Heads of a thread: eight packs are on their way, of which a pair has one, or two where its halves lie apart. In fp32 the angles are no
// wider than what they turn, and fewer packs are sooner done.
template <class T, bool INTERLEAVED>
constexpr int HEADS = INTERLEAVED ? (sizeof(T) == 4 ? 2 : 8) : sizeof(T) == 4 ? 1 : 4;
// Channels of a pack where heads are no whole packs of 16 bytes, as of 100 channels: neighbours' lie side by side.
constexpr int FEW = 2;
// Pairs of a thread.
template <bool INTERLEAVED, int N>
constexpr int PAIRS = N / (INTERLEAVED ? 2 : 1);

struct Sizes {
    int64_t tokens, heads, dim, pairs, period;  // period: tokens after which the angles begin anew
    int64_t packs, rests, groups;               // of a head: packs of pairs, packs of channels that pass; groups of heads
    float way;                                  // 1, or -1: back
};

// Angles, which stay in the second cache until the next sequence wants them.
template <bool VECTOR, int N>
__device__ __forceinline__ Pack<float, N> load_angles(const float* p, int count) {
    if (!VECTOR || count != N) return load<VECTOR, N>(p, count);
    Pack<float, N> pack;
    using Word = std::conditional_t<N == 1, float, WordOf<decltype(pack)>>;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(Word)); i++)
        reinterpret_cast<Word*>(&pack)[i] = read_passing(reinterpret_cast<const Word*>(p) + i);
    return pack;
}

template <class T, bool INTERLEAVED, int N, bool VECTOR>
__global__ __launch_bounds__(THREADS) void rotate(const T* x, T* y, const float* cos, const float* sin, Sizes z) {
    if (!present<T>) return;
    constexpr int MANY = HEADS<T, INTERLEAVED>, P = PAIRS<INTERLEAVED, N>, APART = INTERLEAVED ? 1 : 2;
    const int64_t each = z.packs + z.rests, items = z.tokens * z.groups * each;
    const int64_t item = int64_t{blockIdx.x} * THREADS + threadIdx.x;
    if (item >= items) return;
    const int64_t before = quotient(item, each), pack = item - before * each;
    const int64_t token = quotient(before, z.groups), group = before - token * z.groups;
    const int64_t row = (token * z.heads + group * MANY) * z.dim;
    const int heads = some<MANY>(group * MANY, z.heads);
    if (pack >= z.packs) {  // channels that pass
        const int64_t at = 2 * z.pairs + (pack - z.packs) * N;
        const int count = some<N, VECTOR>(at, z.dim);
        for (int head = 0; head < heads; head++)
            store<VECTOR>(y + row + head * z.dim + at, load<VECTOR, N>(x + row + head * z.dim + at, count), count);
        return;
    }
    const int count = some<P, VECTOR>(pack * P, z.pairs);
    const int64_t angle = remainder(token, z.period) * z.pairs + pack * P;
    const Pack<float, P> c = load_angles<VECTOR, P>(cos + angle, count), s = load_angles<VECTOR, P>(sin + angle, count);
    const int64_t at = row + pack * N;  // of the first of each pair, or of both, which are neighbours
    const int many = INTERLEAVED ? 2 * count : count;
    Pack<T, N> in[MANY][APART];
#pragma unroll
    for (int head = 0; head < MANY; head++)
#pragma unroll
        for (int half = 0; half < APART; half++)
            if (head < heads) in[head][half] = load<VECTOR, N>(x + at + head * z.dim + half * z.pairs, many);
#pragma unroll
    for (int head = 0; head < MANY; head++)
        if (head < heads) {
            float found[APART][N];
#pragma unroll
            for (int half = 0; half < APART; half++) spread(in[head][half], found[half]);
#pragma unroll
            for (int i = 0; i < P; i++) {
                float& p = found[0][INTERLEAVED ? 2 * i : i];
                float& q = found[APART - 1][INTERLEAVED ? 2 * i + 1 : i];
                const float u = p, v = q, turn = s.at[i] * z.way;
                p = u * c.at[i] - v * turn;
                q = v * c.at[i] + u * turn;
            }
#pragma unroll
            for (int half = 0; half < APART; half++)
                store<VECTOR>(y + at + head * z.dim + half * z.pairs, rounded<T>(found[half]), many);
        }
}

}  // namespace

MC_KERNEL(rotary) {
    const Rotary a(call);
    check_present(call, a.y.dtype);
    const Array& from = a.x ? a.x : a.y;
    const bool aligned = from.aligned() && a.y.aligned() && a.cos.aligned() && a.sin.aligned();
    const auto whole = [&](int64_t channels) { return aligned && a.dim % channels == 0 && a.pairs % channels == 0; };
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(a.y.dtype, T, MC_FOR_BOOL(a.interleaved, INTERLEAVED, {
        const auto run = [&](auto channels, auto vector) {
            constexpr int N = decltype(channels)::value;
            const auto parts = [](int64_t all, int64_t each) { return (all + each - 1) / each; };
            const Sizes sizes{a.tokens, a.heads, a.dim, a.pairs, a.period, parts(a.pairs, PAIRS<INTERLEAVED, N>),
                              a.x ? parts(a.dim - 2 * a.pairs, N) : 0, parts(a.heads, HEADS<T, INTERLEAVED>), a.way};
            const int64_t items = sizes.tokens * sizes.groups * (sizes.packs + sizes.rests);
            if (!items) return;
            rotate<T, INTERLEAVED, N, decltype(vector)::value><<<static_cast<unsigned>(parts(items, THREADS)), THREADS, 0, stream>>>(
                from.as<T>(), a.y.as<T>(), a.cos.as<float>(), a.sin.as<float>(), sizes);
        };
        const std::integral_constant<int, SPAN<T>> span;
        const std::integral_constant<int, FEW> few;
        if (whole(8)) run(span, std::true_type{});
        else if (whole(FEW)) run(few, std::true_type{});
        else run(few, std::false_type{});
    }))
}
