// Attention with a relative bias on tensor cores, forward: softmax(q k^T scale + bias[key - query]) v, for which no score is stored
// (FlashAttention-2, Dao, 2023). ops/relative_attention.py says what it means.
//
// A block takes 16 M queries a warp and goes through the keys, ACROSS at a time, of which the next are on their way while these are
// computed with; a row's largest score and sum so far stay in registers. Kept for the backward is one number a row, the logarithm of
// the sum of its powers: infinite where a row sees nothing, so that its probabilities are zero when they are computed again.
#include "attention.h"

namespace {

template <class S>
struct Layout : S::Forward {  // of shared memory, in bytes
    using S::Forward::M, S::Forward::ACROSS;
    static constexpr int ROWS = 16 * M * WARPS, STRIP = ROWS + ACROSS;
    static constexpr size_t Q = size_t{2} * ROWS * S::STRIDE, K = size_t{2} * ACROSS * S::STRIDE, BYTES = Q + 4 * K + 2 * 4 * STRIP;
};

template <class T, class S>
__device__ __forceinline__ void attend(const Problem& p, T* out, float* lse, int64_t block, int64_t tiles_of_one) {
    using L = Layout<S>;
    constexpr int M = L::M, N = L::ACROSS / 8;
    extern __shared__ uint4 memory[];
    char* const bytes = reinterpret_cast<char*>(memory);
    T* const q = reinterpret_cast<T*>(bytes);
    T *const ks = q + L::ROWS * S::STRIDE, *const vs = ks + 2 * L::ACROSS * S::STRIDE;  // two of each: one is computed with
    float* const strips = reinterpret_cast<float*>(bytes + L::Q + 4 * L::K);

    const int64_t pair = block / tiles_of_one;
    const Sequence of(p, pair / p.heads, pair % p.heads);
    // Under causality the last queries see the most keys: first, so that the chip is not left with a few long ones.
    for (int64_t tile = tiles_of_one - 1 - block % tiles_of_one; tile * L::ROWS < of.s; tile += tiles_of_one) {
        const auto i0 = static_cast<int32_t>(tile * L::ROWS), last = i0 + L::ROWS < of.s ? i0 + L::ROWS : of.s;
        const int32_t end = of.limit(last - 1), steps = end > 0 ? (end + L::ACROSS - 1) / L::ACROSS : 0;
        const T *const k = of.keys(static_cast<const T*>(p.k)), *const v = of.keys(static_cast<const T*>(p.v));
        const auto load = [&](int32_t step) {
            const int32_t j0 = step * L::ACROSS, at = step % 2 * L::ACROSS * S::STRIDE;
            load_rows<L::ACROSS, S>(ks + at, k, of, j0, end);
            load_rows<L::ACROSS, S>(vs + at, v, of, j0, end);
            load_strip<L::ROWS, L::ACROSS>(strips + step % 2 * L::STRIP, p, of, i0, j0);
            commit();
        };

        float sums[M][S::TILES][4] = {}, top[2 * M], total[2 * M] = {};
#pragma unroll
        for (int r = 0; r < 2 * M; r++) top[r] = -INFINITY;
        if (!p.bias) zero(strips, 2 * L::STRIP);
        load_rows<L::ROWS, S>(q, of.queries(static_cast<const T*>(p.q)), of, i0, of.s);
        if (steps) load(0);
        for (int32_t step = 0; step < steps; step++) {
            if (step + 1 < steps) load(step + 1), wait(1);
            else wait(0);
            __syncthreads();
            const int32_t j0 = step * L::ACROSS, at = step % 2 * L::ACROSS * S::STRIDE;
            float x[M][N][4] = {};
            rows_by_rows<T, S::DIM, S::STRIDE>(x, q + warp() * 16 * M * S::STRIDE, ks + at);
            score<false>(x, strips + step % 2 * L::STRIP, p.scale);
            if (p.seen || j0 + L::ACROSS > of.limit(i0))
                each<M, N>([&](int m, int n, int e) {
                    const int32_t i = i0 + warp() * 16 * M + 16 * m + e / 2 * 8 + g(), j = j0 + 8 * n + 2 * c() + e % 2;
                    if (j >= of.limit(i) || (p.seen && !p.seen[of.k0 + j])) x[m][n][e] = -INFINITY;
                });
#pragma unroll
            for (int r = 0; r < 2 * M; r++) {
                float high = top[r];
#pragma unroll
                for (int n = 0; n < N; n++) high = fmaxf(high, fmaxf(x[r / 2][n][r % 2 * 2], x[r / 2][n][r % 2 * 2 + 1]));
                high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFFu, high, 1));
                high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFFu, high, 2));
                const float base = high == -INFINITY ? 0.0f : high, less = quick_exp2(top[r] - base);
                top[r] = high, total[r] *= less;
#pragma unroll
                for (int n = 0; n < S::TILES; n++) sums[r / 2][n][r % 2 * 2] *= less, sums[r / 2][n][r % 2 * 2 + 1] *= less;
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = r % 2 * 2; e < r % 2 * 2 + 2; e++) {
                        x[r / 2][n][e] = quick_exp2(x[r / 2][n][e] - base);
                        total[r] += x[r / 2][n][e];
                    }
            }
            if (p.seed)
                each_kept<false, M, N>(p, of.row + i0 + warp() * 16 * M, j0, [&](int m, int n, int e, bool keep) {
                    x[m][n][e] = keep ? x[m][n][e] : 0.0f;
                });
            weights_by_rows<T, S::STRIDE>(sums, x, vs + at);
            __syncthreads();
        }
        wait(0);
        __syncthreads();  // where no key is seen, the queries may still be on their way to where the result goes

        float part[2 * M];
#pragma unroll
        for (int r = 0; r < 2 * M; r++) {
            total[r] += __shfl_xor_sync(0xFFFFFFFFu, total[r], 1);
            total[r] += __shfl_xor_sync(0xFFFFFFFFu, total[r], 2);
            part[r] = total[r] == 0.0f ? 0.0f : p.kept / total[r];
            const int32_t i = i0 + warp() * 16 * M + r / 2 * 16 + r % 2 * 8 + g();
            if (c() == 0 && i < of.s) lse[of.row + i] = total[r] == 0.0f ? INFINITY : top[r] + log2f(total[r]);
        }
        put_rows<S, M>(of.queries(out), q, sums, of, i0, of.s, [&](int r) { return part[r]; });
        __syncthreads();
    }
}

template <class T, class S>
__global__ __launch_bounds__(THREADS) void forward(const Problem p, T* out, float* lse, int64_t tiles_of_one) {
    if constexpr (ABLE<T, S>) attend<T, S>(p, out, lse, blockIdx.x, tiles_of_one);
}

}  // namespace

MC_KERNEL(relative_attention) {
    Array q;
    const Problem p = read(call, q);
    const Array out = call.out("out", q.dtype, q.shape);
    const Array lse = call.out("lse", F32, Shape{p.batch, p.heads, p.s});
    call.ready();
    if (!out.aligned()) call.refuse("out: not aligned to 16 bytes");
    check_chip(call, q, p);
    if (!p.sequences || !p.heads || !p.longest_q) return;
    MC_FOR_HALF(q.dtype, T, MC_FOR_SIZES(p.dim, S, {
        const int64_t each = tiles(p.longest_q, Layout<S>::ROWS);
        launch(call, forward<T, S>, p.sequences * p.heads * each, Layout<S>::BYTES, p, out.as<T>(), lse.as<float>(), each);
    }))
}
