// Attention with a relative bias on tensor cores, forward: softmax(q k^T scale + bias[key - query]) v, for which no score is stored
// (FlashAttention-2, Dao, 2023). ops/relative_attention.py says what it means.
//
// A block takes 16 M queries a warp and goes through the keys, ACROSS at a time, of which the next are on their way while these are
// computed with. A row's sum and the score that its powers are relative to stay in registers: the largest so far, until one is larger by
// more than SLACK, so that what was added up is seldom multiplied again (powers of up to 2^SLACK lose nothing). Kept for the backward is
// one number a row, the logarithm of the sum of its powers: infinite where a row sees nothing, so that its probabilities are zero when
// they are computed again.
#include "attention.h"

namespace {

constexpr float SLACK = 8.0f;

// Of 16 M rows a warp, in units of log 2: what scores are relative to, the largest that one may be without another `top`, and the sum
// of their powers, a part of it in each of four lanes.
template <int M>
struct Totals {
    float top[2 * M] = {}, total[2 * M] = {};

    // The other lanes' parts, and the logarithm of all (see above) to `lse`, rows [first, end) of b h s. What a result is multiplied by.
    __device__ __forceinline__ void finish(float (&part)[2 * M], float kept, float* lse, int32_t first, int32_t end) {
#pragma unroll
        for (int r = 0; r < 2 * M; r++) {
            total[r] += __shfl_xor_sync(0xFFFFFFFFu, total[r], 1);
            total[r] += __shfl_xor_sync(0xFFFFFFFFu, total[r], 2);
            part[r] = total[r] == 0.0f ? 0.0f : kept / total[r];
            const int32_t i = first + r / 2 * 16 + r % 2 * 8 + g();
            if (c() == 0 && i < end) lse[i] = total[r] == 0.0f ? INFINITY : top[r] + log2f(total[r]);
        }
    }
};

template <int M>
struct Rows : Totals<M> {
    using Totals<M>::top, Totals<M>::total;
    float most[2 * M];

    __device__ Rows() {
#pragma unroll
        for (int r = 0; r < 2 * M; r++) most[r] = -INFINITY;  // nothing before the first one
    }

    // x = 2^x, of scores relative to `top`, which may rise: then says that sums of all so far are to be multiplied by `less`.
    template <int N>
    __device__ __forceinline__ bool powers(float (&x)[M][N][4], float (&less)[2 * M]) {
        float high[2 * M];
        bool above = false;
#pragma unroll
        for (int r = 0; r < 2 * M; r++) {
            less[r] = 1.0f, high[r] = -INFINITY;
#pragma unroll
            for (int n = 0; n < N; n++) high[r] = fmaxf(high[r], fmaxf(x[r / 2][n][r % 2 * 2], x[r / 2][n][r % 2 * 2 + 1]));
            above |= high[r] > most[r];
        }
        above = __any_sync(0xFFFFFFFFu, above);
        if (above) {
#pragma unroll
            for (int r = 0; r < 2 * M; r++) {
                high[r] = fmaxf(high[r], __shfl_xor_sync(0xFFFFFFFFu, high[r], 1));
                high[r] = fmaxf(high[r], __shfl_xor_sync(0xFFFFFFFFu, high[r], 2));
                const float more = high[r] > most[r] ? high[r] : 0.0f;
                if (most[r] == SLACK) less[r] = quick_exp2(-more);
                if (high[r] > most[r]) most[r] = SLACK;
                top[r] += more, total[r] *= less[r];
#pragma unroll
                for (int n = 0; n < N; n++) x[r / 2][n][r % 2 * 2] -= more, x[r / 2][n][r % 2 * 2 + 1] -= more;
            }
        }
        each<M, N>([&](int m, int n, int e) {
            x[m][n][e] = quick_exp2(x[m][n][e]);
            total[2 * m + e / 2] += x[m][n][e];
        });
        return above;
    }
};

// Scores, products so far, to powers, of which some are dropped: of a tile of queries [i0, i0 + ...) and keys [j0, j0 + 8 N).
template <int ROWS, int M, int N>
__device__ __forceinline__ bool weigh(float (&x)[M][N][4], float (&less)[2 * M], Rows<M>& rows, const Problem& p, const Sequence& of,
                                      int32_t i0, int32_t j0, bool mixed, const float* strip, bool far, bool some) {
    score<false, ROWS>(x, p, of, i0, j0, mixed, far, strip, [&](int m, int, int e) { return rows.top[2 * m + e / 2]; });
    if (some || j0 + 8 * N > of.limit(i0)) hide<false>(x, p, of, i0 + warp() * 16 * M, j0);
    const bool above = rows.powers(x, less);
    if (p.seed)
        each_kept<false, M, N>(p, of.row + i0 + warp() * 16 * M, j0, [&](int m, int n, int e, bool keep) {
            x[m][n][e] = keep ? x[m][n][e] : 0.0f;
        });
    return above;
}

template <int M, int TILES>
__device__ __forceinline__ void lessen(float (&sums)[M][TILES][4], const float (&less)[2 * M]) {
    each<M, TILES>([&](int m, int n, int e) { sums[m][n][e] *= less[2 * m + e / 2]; });
}

template <class S>
struct Layout : Block<S, typename S::Forward> {  // of shared memory, in bytes
    using B = Block<S, typename S::Forward>;
    static constexpr size_t BYTES = S::ALIGN - 16 + B::OWN + 4 * B::OTHER + 2 * sizeof(float) * B::STRIP;
};

template <class T, class S>
__device__ __forceinline__ void attend(const Problem& p, T* out, float* lse, uint32_t block, uint32_t tiles_of_one) {
    using L = Layout<S>;
    constexpr int M = L::M, N = L::N;
    extern __shared__ uint4 memory[];
    T* const q = reinterpret_cast<T*>(aligned<S::ALIGN>(memory));
    T *const ks = q + S::elements(L::ROWS), *const vs = ks + 2 * S::elements(L::ACROSS);  // two of each: one is computed with
    float* const strips = reinterpret_cast<float*>(vs + 2 * S::elements(L::ACROSS));

    const Sequence of(p, block / tiles_of_one);
    // Under causality the last queries see the most keys: first, so that the chip is not left with a few long ones.
    for (int64_t tile = tiles_of_one - 1 - block % tiles_of_one; tile * L::ROWS < of.s; tile += tiles_of_one) {
        const auto i0 = static_cast<int32_t>(tile * L::ROWS), last = i0 + L::ROWS < of.s ? i0 + L::ROWS : of.s;
        const int32_t end = of.limit(last - 1), steps = end > 0 ? (end + L::ACROSS - 1) / L::ACROSS : 0;
        Feed<L::ACROSS, L::THREADS, S, T, 2> kv(of, 0, end, of.keys(static_cast<const T*>(p.k)), of.keys(static_cast<const T*>(p.v)));
        Strip<L::ROWS, L::ACROSS, L::THREADS, L::ACROSS> bias(p, of, i0, 0);
        const Near<L::ROWS + L::ACROSS - 1, L::ACROSS> near(p, bias.first);
        const auto load = [&](int32_t step) {
            kv.to(ks + step % 2 * S::elements(L::ACROSS), vs + step % 2 * S::elements(L::ACROSS)), bias.to(p, strips + step % 2 * L::STRIP, !near.has(step));
            commit();
        };

        const int32_t mixed = of.mixed_keys(p, i0);
        float sums[M][S::TILES][4] = {};
        Rows<M> rows;
        Feed<L::ROWS, L::THREADS, S, T, 1>(of, i0, of.s, of.queries(static_cast<const T*>(p.q))).to(q);
        if (steps) load(0);
        for (int32_t step = 0; step < steps; step++) {
            wait(0);
            S::arrived();
            __syncthreads();  // these keys are there, and nobody is still at those before, in whose place the next ones go
            const int32_t j0 = step * L::ACROSS, at = step % 2 * S::elements(L::ACROSS);
            float x[M][N][4];
            S::template rows_by_rows<T>(x, q, ks + at);
            if (step + 1 < steps) load(step + 1);
            const bool some = padded<L::ACROSS>(p, of, j0);
            S::finish(x);
            float less[2 * M];
            if (weigh<L::ROWS>(x, less, rows, p, of, i0, j0, j0 < mixed, p.bias ? strips + step % 2 * L::STRIP : nullptr,
                                !near.has(step), some))
                lessen(sums, less);
            S::template weights_by_rows<T>(sums, x, vs + at);
            S::finish(sums);
        }
        wait(0);
        __syncthreads();  // nobody is still at the queries, nor are they on their way where no key is seen: the result goes there

        float part[2 * M];
        rows.finish(part, p.kept, lse + of.row, i0 + warp() * 16 * M, of.s);
        put_rows<S, M>(of.queries(out), q, sums, of, i0, of.s, [&](int r) { return part[r]; });
        __syncthreads();
    }
}

template <class T, class S>
__global__ __launch_bounds__(Layout<S>::THREADS, Layout<S>::BLOCKS) void forward(const Problem p, T* out, float* lse, uint32_t tiles_of_one) {
    if constexpr (ABLE<T, S>) attend<T, S>(p, out, lse, blockIdx.x, tiles_of_one);
}

// ---- the same where nothing is dropped, no key is padding and there is no prompt, heads of up to 64 channels, on Hopper: two
// warpgroups of 64 queries each share their keys, which its copy engine brings. The second cache has then half as much to give, and a
// score costs little but its own arithmetic. The groups wait for each other only where one is two tiles ahead.

#ifdef MC_HOPPER
constexpr int32_t LONGEST = 4096;  // keys, for which a bias fits in shared memory

template <class T, bool BIASED>
struct Pairs {
    static constexpr int GROUPS = 2, THREADS = 128 * GROUPS, BLOCKS = 2, ROWS = 64 * GROUPS, STAGES = 4;
    static constexpr int32_t STRIP = LONGEST / 2 + ROWS;  // numbers of one of two short strips, in whose place is a long one; before either two
    using Keys = Ring<T, STAGES, THREADS / 32>;
    static constexpr size_t BYTES = 1024 - 16 + sizeof(T) * Keys::TILE * GROUPS + Keys::BYTES + 2 * sizeof(Barrier) +
                                    sizeof(float) * (BIASED ? 2 * (STRIP + 2) : 0);
};

// Scores to powers, rounded, that are relative to `top`. It is raised only where a lane's powers of a row add up to more than MOST, and
// found only where those of the first tile add up to less than LEAST, or it is not a number: so the largest score is mostly not looked for.
template <class T>
struct Powers : Totals<1> {
    static constexpr float MOST = 4096.0f, LEAST = 0.25f;


    __device__ __forceinline__ void powers(uint32_t (&left)[4][4], float (&sum)[2], const float (&x)[1][8][4], float times, float top0, float top1) {
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float top = r ? top1 : top0;
                const float a = quick_exp2(fmaf(x[0][n][2 * r], times, -top)), b = quick_exp2(fmaf(x[0][n][2 * r + 1], times, -top));
                sum[r] += a, sum[r] += b;
                left[n / 2][n % 2 * 2 + r] = pack2<T>(a, b);
            }
    }

    // x `times` and `more` in units of log 2, of the `first` tile or a later one; `sums` are multiplied by what they lose where `top` rises
    template <int TILES>
    __device__ __forceinline__ void add(uint32_t (&left)[4][4], const float (&x)[1][8][4], float times, float more, bool first, float (&sums)[1][TILES][4]) {
        float sum[2];
        powers(left, sum, x, times, top[0] - more, top[1] - more);
        const bool none = first && !(sum[0] >= LEAST && sum[1] >= LEAST);
        if (__any_sync(0xFFFFFFFFu, none || !(sum[0] <= MOST && sum[1] <= MOST))) {
            float less[2], base[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float high = -INFINITY;
                bool again = !(sum[r] <= MOST);
                if (first) {  // all four lanes of a row, whatever the other rows are
                    const float other = fmaxf(sum[r], __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1));
                    const float most = fmaxf(other, __shfl_xor_sync(0xFFFFFFFFu, other, 2));
                    again = !(most >= LEAST && most <= MOST);
                }
                if (again)  // of a row's four lanes; the others' powers are none above MOST
#pragma unroll
                    for (int n = 0; n < 8; n++) high = fmaxf(high, fmaxf(x[0][n][2 * r] * times, x[0][n][2 * r + 1] * times));
                high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFFu, high, 1));
                high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFFu, high, 2));
                high += more;
                const bool anew = first && again, began = !anew && top[r] == top[r];
                const float next = high == -INFINITY ? (anew ? NAN : top[r]) : began ? fmaxf(top[r], high) : high;
                less[r] = began ? quick_exp2(top[r] - next) : 1.0f;
                top[r] = next, total[r] *= less[r], base[r] = (next == next ? next : 0.0f) - more;
            }
            powers(left, sum, x, times, base[0], base[1]);
            lessen(sums, less);
        }
        total[0] += sum[0], total[1] += sum[1];
    }
};

// 64 rows of a warpgroup, times a number each, from registers: four lanes have of a row's 32 channels 16 bytes each when they have turned
// what they hold.
template <class T>
__device__ __forceinline__ void put_turned(T* to, const float (&sums)[1][8][4], const float (&part)[2], const Sequence& of, int32_t first) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t i = first + 8 * r + g();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t a[4], b[2];
#pragma unroll
            for (int n = 0; n < 4; n++)
                a[n] = pack2<T>(sums[0][4 * half + n][2 * r] * part[r], sums[0][4 * half + n][2 * r + 1] * part[r]);
            const bool odd = c() % 2, late = c() / 2;
            const uint32_t x = __shfl_xor_sync(0xFFFFFFFFu, odd ? a[0] : a[1], 1), y = __shfl_xor_sync(0xFFFFFFFFu, odd ? a[2] : a[3], 1);
            a[0] = odd ? x : a[0], a[1] = odd ? a[1] : x, a[2] = odd ? y : a[2], a[3] = odd ? a[3] : y;
            b[0] = __shfl_xor_sync(0xFFFFFFFFu, late ? a[0] : a[2], 2), b[1] = __shfl_xor_sync(0xFFFFFFFFu, late ? a[1] : a[3], 2);
            const int channel = 32 * half + 8 * c();
            if (i < of.s && channel < of.dim)
                *reinterpret_cast<uint4*>(to + i * of.step + channel) =
                    late ? make_uint4(b[0], b[1], a[2], a[3]) : make_uint4(a[0], a[1], b[0], b[1]);
        }
    }
}

template <class T, bool BIASED>
__device__ __forceinline__ void attend_in_pairs(const Maps& maps, const Problem& p, T* out, float* lse, uint32_t items, uint32_t tiles_of_one) {
    using L = Pairs<T, BIASED>;
    using S = Groups<64>;
    constexpr int AHEAD = L::STAGES - 2;  // pairs of tiles that are asked for
    extern __shared__ uint4 memory[];
    T* const q = reinterpret_cast<T*>(aligned<S::ALIGN>(memory));
    typename L::Keys keys(q + S::elements(L::ROWS));
    Barrier *const own = keys.empty + L::STAGES, *const taken = own + 1;
    auto* const strips = reinterpret_cast<float*>(own + 2) + 2;
    const bool leads = threadIdx.x == 0;
    if (leads) keys.begin_all(), begin(own, 1), begin(taken, L::THREADS / 32), begun();
    __syncthreads();

    const int group = static_cast<int>(threadIdx.x / 128);
    uint32_t turn = 0;
    bool asked = false;  // for what a tile begins with, while the one before it was done
    for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
        const Sequence of(p, item / tiles_of_one);
        for (int64_t tile = tiles_of_one - 1 - item % tiles_of_one; tile * L::ROWS < of.s; tile += tiles_of_one, turn++) {
            const auto i0 = static_cast<int32_t>(tile * L::ROWS), last = i0 + L::ROWS < of.s ? i0 + L::ROWS : of.s;
            const int32_t first = i0 + 64 * group, own_last = first + 64 < of.s ? first + 64 : of.s;
            int32_t end = of.limit(last - 1);
            if (BIASED && end > LONGEST) end = LONGEST;  // lengths that are not as was said
            const int32_t steps = end > 0 ? (end + 63) / 64 : 1;  // one at least, whatever is there
            const auto ask = [&](int32_t step) {
                if (leads && step < steps) keys.ask(maps.k, maps.v, of.head, static_cast<int32_t>(of.k0) + 64 * step);
                __syncwarp();
            };
            // What a tile begins with, `rows` of queries from i on.
            const auto ask_first = [&](const Sequence& of, int32_t i) {
                if (turn) wait_until(taken, (turn - 1) % 2);
                expect(own, sizeof(T) * S::elements(L::ROWS));
                for (int k = 0; k < L::GROUPS; k++) copy_tile(q + S::elements(64 * k), maps.q, own, of.head, static_cast<int32_t>(of.q0) + i + 64 * k);
                for (int32_t step = 0; step < AHEAD && step < steps; step++)
                    keys.ask(maps.k, maps.v, of.head, static_cast<int32_t>(of.k0) + 64 * step);
            };
            float* const strip = strips + (asked && turn % 2 ? L::STRIP + 2 : 0);
            if (!asked) {
                if (leads) ask_first(of, i0);
                __syncwarp();
                if (BIASED) lay_out<L::THREADS, L::ROWS>(strip, p, of, i0, 0, 64 * steps);
            }
            const Near<127, 64> near(p, BIASED ? number<64>(p, of, first, 0) : 0);
            if (BIASED) __syncthreads();
            wait_until(own, turn % 2);
            typename S::Rows left;
            S::template take<T>(left, q + S::elements(64 * group));
            __syncwarp();
            if (lane() == 0) arrive(taken);

            float sums[1][S::TILES][4] = {}, x[1][8][4];
            Powers<T> rows;
            const auto next = [&](int32_t step) {  // its scores are asked for
                T* const k = keys.next();
                if (64 * step + 64 > of.t) clear<S>(k + S::elements(64), of.t - 64 * step, group);
                S::template rows_by_rows<T>(x, left, k);
            };
            const int32_t seen = first < of.s ? of.limit(own_last - 1) : 0;  // keys that one of the group's queries sees are before this one
            S::hold(sums);
            next(0);
            S::finish(x);
            ask(AHEAD);
            for (int32_t step = 0;;) {
                const int32_t j0 = 64 * step;
                typename S::Left weights;
                if (j0 < seen) {
                    float times = p.scale, more = 0.0f;
                    if (BIASED && !near.has(step)) {
                        more = strip[step < near.begin ? -2 : -1];
                    } else if (BIASED) {
                        const float* const at = strip + j0 + L::ROWS - 1 - (warp() * 16 + g() - 2 * c());
                        each<1, 8>([&](int m, int n, int e) { x[m][n][e] = fmaf(x[m][n][e], p.scale, at[8 * n + e % 2 - e / 2 * 8]); });
                        times = 1.0f;
                    }
                    if (j0 + 64 > of.limit(first)) {
                        if (!BIASED || times != 1.0f) each<1, 8>([&](int m, int n, int e) { x[m][n][e] *= p.scale; });
                        hide<false>(x, p, of, i0 + warp() * 16, j0);
                        times = 1.0f;
                        if (step == 0) rows.top[0] = rows.top[1] = NAN;  // rows of few keys, whose largest counts: it is then exact
                    }
                    rows.add(weights, x, times, more, step == 0, sums);
                } else {
#pragma unroll
                    for (int k = 0; k < 16; k++) weights[k / 4][k % 4] = 0;
                }
                S::template left_by_rows<T>(sums, weights, keys.last() + S::elements(64));
                if (++step == steps) break;
                next(step);
                S::finish(sums, x);
                keys.leave();
                ask(step + AHEAD);
            }
            // The next tile's, if it is known to be like this one, before this one's result.
            const uint32_t after = item + gridDim.x;
            asked = after < items && !p.causal && !p.ends_q && (!BIASED || 64 * steps + L::ROWS <= L::STRIP);
            if (asked) {
                const Sequence next(p, after / tiles_of_one);
                const auto i = static_cast<int32_t>(tiles_of_one - 1 - after % tiles_of_one) * L::ROWS;
                turn++;
                if (leads) ask_first(next, i);
                __syncwarp();
                if (BIASED) lay_out<L::THREADS, L::ROWS>(strips + (turn % 2 ? L::STRIP + 2 : 0), p, next, i, 0, 64 * steps);
                turn--;
            }
            S::finish(sums);
            keys.leave();

            float part[2];
            rows.finish(part, p.kept, lse + of.row, i0 + warp() * 16, of.s);
            put_turned<T>(of.queries(out), sums, part, of, i0 + warp() * 16);
            if (BIASED && !asked) __syncthreads();  // the next bias may come
        }
    }
}

template <class T, bool BIASED>
__global__ __launch_bounds__(Pairs<T, BIASED>::THREADS, Pairs<T, BIASED>::BLOCKS) void forward_in_pairs(
    const __grid_constant__ Maps maps, const Problem p, T* out, float* lse, uint32_t items, uint32_t tiles_of_one) {
#if defined(MC_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    attend_in_pairs<T, BIASED>(maps, p, out, lse, items, tiles_of_one);
#endif
}

// Whether it is for this problem, which then is done.
inline bool in_pairs(Call& call, int chip, const Problem& p, Dtype dtype, void* out, float* lse) {
    const int64_t each = tiles(p.longest_q, 128), blocks = p.sequences * p.heads * each;
    Maps maps;
    if (blocks < multiprocessors() || (p.bias && p.longest_k > LONGEST) || !described(maps, chip, p)) return false;
    MC_FOR_HALF(dtype, T, MC_FOR_BOOL(p.bias != nullptr, BIASED, {
        const int64_t at_once = int64_t{multiprocessors()} * Pairs<T, BIASED>::BLOCKS;
        const bool alike = !p.causal && !p.ends_q && blocks > at_once && blocks <= INT32_MAX;  // else who has done its first takes what is left
        launch<Pairs<T, BIASED>>(call, forward_in_pairs<T, BIASED>, alike ? at_once : blocks, maps, p, static_cast<T*>(out), lse, blocks, each);
    }))
    return true;
}
#endif

}  // namespace

MC_KERNEL(relative_attention) {
    Array q;
    const Problem p = read(call, q);
    const Array out = call.out("out", q.dtype, q.shape);
    const Array lse = call.out("lse", F32, Shape{p.batch, p.heads, p.s});
    call.ready();
    if (!out.aligned()) call.refuse("out: not aligned to 16 bytes");
    const int chip = check_chip(call, q.dtype);
    if (!p.sequences || !p.heads || !p.longest_q) return;
#ifdef MC_HOPPER
    if (in_pairs(call, chip, p, q.dtype, out.data, lse.as<float>())) return;
#endif
    MC_FOR_TILES(chip, q.dtype, p.dim, T, S, {
        const int64_t each = tiles(p.longest_q, Layout<S>::ROWS);
        launch<Layout<S>>(call, forward<T, S>, p.sequences * p.heads * each, p, out.as<T>(), lse.as<float>(), each);
    })
}
