// Attention with a relative bias on tensor cores, backward: with P the probabilities, M the dropout mask over 1 - p,
// dP = M * (dO V^T) and D = sum(dO * O) of each row,
//
//     dS = P * (dP - D),   dV = (M * P)^T dO,   dK = dS^T Q scale,   dQ = dS K scale,   dbias[key - query] = sums of dS's diagonals
//
// P is computed again, twice: `of_keys` has a block for some keys that goes through all queries, `of_queries` one for some queries
// that goes through all keys, and that finds D. So every gradient is summed up by one block in its order, without an atomic: two runs
// are equal to the bit (two more products than five, instead of sums in memory; on Hopper without a bias `of_heads` does with five). The first computes transposed, keys in rows: then M P
// and dS are in both the left factors of the products that follow, and go through no shared memory.
//
// A thread's numbers of dS lie on 2 (2 M + N - 1) diagonals, along which it adds them up in registers; what the 32 lanes found goes to
// shared memory as 8 rows, of columns 2 c + e modulo 8, which are added up by a thread a diagonal while the next tile's products are
// on their way. That sum goes to `partial`: some
// vectors for each head, of which a block has one to itself for all the queries it does, however many; `add_up` makes one of them.
// So memory grows with the length and not with its square.
#include "attention.h"

namespace {

constexpr int THREADS = 128;  // of what is no product

struct Gradients {
    const void *out, *grad;
    const float* lse;
    float* inner;  // D, laid out as lse
    void *dq, *dk, *dv;
    int32_t beside;  // so many tensors' rows lie side by side there: 1, or 3
    float* partial;  // (heads, parts, numbers that are read), zero at first, or null
    int64_t parts;   // blocks of a head
};

// ---- dK and dV

template <class S>
struct KeysLayout : Block<S, typename S::OfKeys> {
    using B = Block<S, typename S::OfKeys>;
    static constexpr int STAGES = S::TURNS ? 3 : 2;  // tiles of queries
    static constexpr size_t BYTES = S::ALIGN - 16 + 2 * B::OWN + STAGES * (2 * B::OTHER + sizeof(float) * (B::STRIP + 2 * B::ACROSS));
};

// Queries that see keys before this one see all of the ROWS from j0 on: where the last of them ends, or where one of them is padding none do.
template <int ROWS>
__device__ __forceinline__ int32_t end_of(const Problem& p, const Sequence& of, int32_t j0) {
    return padded<ROWS>(p, of, j0) ? INT32_MAX : j0 + ROWS;
}

// Of a tile of keys in rows [j0, j0 + ROWS) and queries [i0, i0 + 8 N): scores to probabilities. `end`: see `end_of`.
template <int ROWS, int M, int N>
__device__ __forceinline__ void probable(float (&x)[M][N][4], const Problem& p, const Sequence& of, int32_t i0, int32_t j0, bool mixed,
                                         const float* lse, const float* strip, bool far, int32_t end) {
    score<true, ROWS>(x, p, of, i0, j0, mixed, far, strip, [&](int, int n, int e) { return lse[8 * n + e % 2]; });
    if (i0 + 8 * N > of.s || end > of.limit(i0)) hide<true>(x, p, of, i0, j0 + warp() * 16 * M);
    each<M, N>([&](int m, int n, int e) { x[m][n][e] = quick_exp2(x[m][n][e]); });
}

template <class T, class S>
__device__ __forceinline__ void of_keys_body(const Problem& p, const Gradients& to, uint32_t block, uint32_t tiles_of_one) {
    using L = KeysLayout<S>;
    constexpr int M = L::M, N = L::N;
    extern __shared__ uint4 memory[];
    T *const ks = reinterpret_cast<T*>(aligned<S::ALIGN>(memory)), *const vs = ks + S::elements(L::ROWS);
    T *const qs = vs + S::elements(L::ROWS), *const grads = qs + 2 * S::elements(L::ACROSS);  // two of each
    float* const strips = reinterpret_cast<float*>(grads + 2 * S::elements(L::ACROSS));
    float* const numbers = strips + 2 * L::STRIP;  // of queries: what lse holds, then D

    const Sequence of(p, block / tiles_of_one);
    for (int64_t tile = block % tiles_of_one; tile * L::ROWS < of.t; tile += tiles_of_one) {
        const auto j0 = static_cast<int32_t>(tile * L::ROWS);
        const int32_t first = of.viewer(j0) / L::ACROSS, steps = (of.s + L::ACROSS - 1) / L::ACROSS;
        Feed<L::ACROSS, L::THREADS, S, T, 2> rows(of, first * L::ACROSS, of.s, of.queries(static_cast<const T*>(p.q)),
                                                  of.queries(static_cast<const T*>(to.grad)));
        Strip<L::ACROSS, L::ROWS, L::THREADS, -L::ACROSS> bias(p, of, first * L::ACROSS, j0);
        const Near<L::ROWS + L::ACROSS - 1, -L::ACROSS> near(p, number<L::ACROSS>(p, of, 0, j0));
        Numbers<L::ACROSS, L::THREADS> rest(to.lse + of.row, to.inner + of.row, first * L::ACROSS, of.s);
        const auto load = [&](int32_t step) {
            rows.to(qs + step % 2 * S::elements(L::ACROSS), grads + step % 2 * S::elements(L::ACROSS));
            bias.to(p, strips + step % 2 * L::STRIP, !near.has(step)), rest.to(numbers + step % 2 * 2 * L::ACROSS);
            commit();
        };

        float dk[M][S::TILES][4] = {}, dv[M][S::TILES][4] = {};
        Feed<L::ROWS, L::THREADS, S, T, 1>(of, j0, of.t, of.keys(static_cast<const T*>(p.k))).to(ks);
        Feed<L::ROWS, L::THREADS, S, T, 1>(of, j0, of.t, of.keys(static_cast<const T*>(p.v))).to(vs);
        if (first < steps) load(first);
        const int32_t end = end_of<L::ROWS>(p, of, j0), mixed = of.mixed_queries(p, j0);
        for (int32_t step = first; step < steps; step++) {
            wait(0);
            S::arrived();
            __syncthreads();  // these queries are there, and nobody is still at those before, in whose place the next ones go
            if (step + 1 < steps) load(step + 1);
            const int32_t i0 = step * L::ACROSS, at = step % 2 * S::elements(L::ACROSS);
            const float *const lse = numbers + step % 2 * 2 * L::ACROSS + 2 * c(), *const inner = lse + L::ACROSS;
            float x[M][N][4], y[M][N][4];
            S::template rows_by_rows<T>(x, ks, qs + at);
            S::template rows_by_rows<T>(y, vs, grads + at);
            S::finish(x, y);
            probable<L::ROWS>(x, p, of, i0, j0, i0 < mixed, lse, p.bias ? strips + step % 2 * L::STRIP : nullptr, !near.has(step), end);
            each_kept<true, M, N>(p, of.row + i0, j0 + warp() * 16 * M, [&](int m, int n, int e, bool keep) {
                y[m][n][e] = x[m][n][e] * ((keep ? y[m][n][e] * p.kept : 0.0f) - inner[8 * n + e % 2]);
                x[m][n][e] = keep ? x[m][n][e] : 0.0f;
            });
            S::template weights_by_rows<T>(dv, x, grads + at);
            S::template weights_by_rows<T>(dk, y, qs + at);
            S::finish(dv, dk);
        }
        wait(0);
        __syncthreads();  // as in the forward
        const float scale = p.scale / LOG2E;
        const Sequence there = of.beside(to.beside);
        put_rows<S, M>(there.keys(static_cast<T*>(to.dk)), ks, dk, there, j0, of.t, [&](int) { return scale; });
        put_rows<S, M>(there.keys(static_cast<T*>(to.dv)), vs, dv, there, j0, of.t, [&](int) { return p.kept; });
        __syncthreads();
    }
}

// The same by a warpgroup, which goes on while the tensor cores multiply: exponentials are computed under the products of dO and V, of
// the next queries' scores and of the dK before, and what becomes of dP under the one of dV. Two blocks of it are faster on a
// multiprocessor than three that wait for each product; forward, and for dQ, it is the other way round, for there is less to do at once.
template <class T, class S>
__device__ __forceinline__ void of_keys_in_turns(const Problem& p, const Gradients& to, uint32_t block, uint32_t tiles_of_one) {
    using L = KeysLayout<S>;
    constexpr int N = L::N;
    static_assert(L::M == 1);
    extern __shared__ uint4 memory[];
    T *const ks = reinterpret_cast<T*>(aligned<S::ALIGN>(memory)), *const vs = ks + S::elements(L::ROWS);
    T *const qs = vs + S::elements(L::ROWS), *const grads = qs + L::STAGES * S::elements(L::ACROSS);
    float* const strips = reinterpret_cast<float*>(grads + L::STAGES * S::elements(L::ACROSS));
    float* const numbers = strips + L::STAGES * L::STRIP;  // of queries: what lse holds, then D

    const Sequence of(p, block / tiles_of_one);
    for (int64_t tile = block % tiles_of_one; tile * L::ROWS < of.t; tile += tiles_of_one) {
        const auto j0 = static_cast<int32_t>(tile * L::ROWS);
        const int32_t first = of.viewer(j0) / L::ACROSS, all = (of.s + L::ACROSS - 1) / L::ACROSS;
        const int32_t steps = all > first ? all : first + 1;  // one at least, of queries that are not there
        Feed<L::ACROSS, L::THREADS, S, T, 2> rows(of, first * L::ACROSS, of.s, of.queries(static_cast<const T*>(p.q)),
                                                  of.queries(static_cast<const T*>(to.grad)));
        Strip<L::ACROSS, L::ROWS, L::THREADS, -L::ACROSS> bias(p, of, first * L::ACROSS, j0);
        const Near<L::ROWS + L::ACROSS - 1, -L::ACROSS> near(p, number<L::ACROSS>(p, of, 0, j0));
        Numbers<L::ACROSS, L::THREADS> rest(to.lse + of.row, to.inner + of.row, first * L::ACROSS, of.s);
        const auto load = [&](int32_t step, int stage) {
            if (step < steps) {
                rows.to(qs + stage * S::elements(L::ACROSS), grads + stage * S::elements(L::ACROSS));
                bias.to(p, strips + stage * L::STRIP, !near.has(step)), rest.to(numbers + stage * 2 * L::ACROSS);
            }
            commit();
        };

        float x[2][1][N][4], y[1][N][4], dk[1][S::TILES][4] = {}, dv[1][S::TILES][4] = {};
        Feed<L::ROWS, L::THREADS, S, T, 1>(of, j0, of.t, of.keys(static_cast<const T*>(p.k))).to(ks);
        Feed<L::ROWS, L::THREADS, S, T, 1>(of, j0, of.t, of.keys(static_cast<const T*>(p.v))).to(vs);
        load(first, 0);
        load(first + 1, 1);
        const int32_t end = end_of<L::ROWS>(p, of, j0), mixed = of.mixed_queries(p, j0);
        wait(1);
        S::arrived();
        __syncthreads();
        S::hold(dk), S::hold(dv);
        S::template rows_by_rows<T>(x[0], ks, qs);
        S::finish(x[0]);
        int stage = 0;
        const auto turn = [&](int32_t step, float (&x)[1][N][4], float (&next)[1][N][4]) {
            const int32_t i0 = step * L::ACROSS, at = stage * S::elements(L::ACROSS);
            const float *const lse = numbers + stage * 2 * L::ACROSS + 2 * c(), *const inner = lse + L::ACROSS;
            const float* const strip = p.bias ? strips + stage * L::STRIP : nullptr;
            S::template rows_by_rows<T>(y, vs, grads + at);
            stage = stage + 1 == L::STAGES ? 0 : stage + 1;
            if (step + 1 < steps) {
                wait(0);
                S::arrived();
                S::template finish_but<1>(dk);
                __syncthreads();  // the next queries are there, and nobody is still at those before these, in whose place others go
                S::template rows_by_rows<T>(next, ks, qs + stage * S::elements(L::ACROSS));
                load(step + 2, stage + 1 == L::STAGES ? 0 : stage + 1);
            } else {
                S::forget(next);
            }
            probable<L::ROWS>(x, p, of, i0, j0, i0 < mixed, lse, strip, !near.has(step), end);
            S::finish(y, next, dk);
            typename S::Left left;
            if (p.seed) {
                float kept[1][N][4];
                each_kept<true, 1, N>(p, of.row + i0, j0 + warp() * 16, [&](int m, int n, int e, bool keep) {
                    y[m][n][e] = (keep ? y[m][n][e] * p.kept : 0.0f) - inner[8 * n + e % 2];
                    kept[m][n][e] = keep ? x[m][n][e] : 0.0f;
                });
                S::template round<T>(left, kept);
            } else {
                each<1, N>([&](int m, int n, int e) { y[m][n][e] -= inner[8 * n + e % 2]; });
                S::template round<T>(left, x);
            }
            S::template left_by_rows<T>(dv, left, grads + at);
            each<1, N>([&](int m, int n, int e) { y[m][n][e] *= x[m][n][e]; });
            S::finish(dv);
            S::template weights_by_rows<T>(dk, y, qs + at);
        };
        for (int32_t step = first;;) {
            turn(step, x[0], x[1]);
            if (++step == steps) break;
            turn(step, x[1], x[0]);
            if (++step == steps) break;
        }
        S::finish(dk, dv);
        wait(0);
        __syncthreads();  // as in the forward
        const float scale = p.scale / LOG2E;
        const Sequence there = of.beside(to.beside);
        put_rows<S, 1>(there.keys(static_cast<T*>(to.dk)), ks, dk, there, j0, of.t, [&](int) { return scale; });
        put_rows<S, 1>(there.keys(static_cast<T*>(to.dv)), vs, dv, there, j0, of.t, [&](int) { return p.kept; });
        __syncthreads();
    }
}

template <class T, class S>
__global__ __launch_bounds__(KeysLayout<S>::THREADS, KeysLayout<S>::BLOCKS) void of_keys(const Problem p, const Gradients to, uint32_t tiles_of_one) {
    if constexpr (!ABLE<T, S>) return;
    else if constexpr (S::TURNS) of_keys_in_turns<T, S>(p, to, blockIdx.x, tiles_of_one);
    else of_keys_body<T, S>(p, to, blockIdx.x, tiles_of_one);
}

// ---- dQ and the bias

template <class S>
struct QueriesLayout : Block<S, typename S::OfQueries> {
    using B = Block<S, typename S::OfQueries>;
    static constexpr int SLOTS = 2 * B::M + B::N - 1;  // diagonals of 8 x 8 blocks in a warp's 16 M x 8 N
    // 4 modulo 16: what a warp stores at once lies in different banks. The last 12 are zeros, also as what is left of the next row.
    static constexpr int FOLD = 8 * SLOTS + 12, FOLDED = B::WARPS * 8 * FOLD;
    static_assert(FOLD % 16 == 4);
    static constexpr size_t REST = S::ALIGN - 16 + 2 * B::OWN + 4 * B::OTHER + sizeof(float) * (2 * B::STRIP + 4 * B::WARPS);
    // Of two one may be stored while another is added up; where Hopper's shared memory has the room, of which a block takes 1 KiB more.
    static constexpr int FOLDS = S::GROUP && B::BLOCKS * (REST + sizeof(float) * 2 * FOLDED + 1024) <= 228 * 1024 ? 2 : 1;
    static constexpr size_t BYTES = REST + sizeof(float) * FOLDS * FOLDED;
};

// Adds up a warp's dS along diagonals as far as one thread can: fold[r][x], r = 2 c + e % 2 a column modulo 8, has what lies at
// key - query = x + r - (16 M - 1), counted from the warp's first row and the tile's first column.
template <int M, int N, int FOLD>
__device__ __forceinline__ void store_diagonals(float* fold, const float (&x)[M][N][4]) {
#pragma unroll
    for (int slot = 0; slot < 2 * M + N - 1; slot++) {
        float sums[2] = {};
#pragma unroll
        for (int a = 0; a < 2 * M; a++) {
            const int n = slot + a - (2 * M - 1);
            if (n >= 0 && n < N) sums[0] += x[a / 2][n][a % 2 * 2], sums[1] += x[a / 2][n][a % 2 * 2 + 1];
        }
        const int at = 8 * slot + 7 - g();
        fold[(2 * c()) * FOLD + at] = sums[0], fold[(2 * c() + 1) * FOLD + at] = sums[1];
    }
}

// What dS has across the prompt's edge is no distance's: taken out, and added to the sums of the warp, one for either way.
template <int M, int N>
__device__ __forceinline__ void set_apart(float (&x)[M][N][4], const Problem& p, const Sequence& of, int32_t i, int32_t j, float* sums) {
    float to_text = 0.0f, to_prompt = 0.0f;
    each_side<false, M, N>(p, of, i, j, [&](int m, int n, int e, bool across, bool forth) {
        to_text += across && forth ? x[m][n][e] : 0.0f, to_prompt += across && !forth ? x[m][n][e] : 0.0f;
        x[m][n][e] = across ? 0.0f : x[m][n][e];
    });
#pragma unroll
    for (int hop = 16; hop; hop /= 2) {
        to_text += __shfl_xor_sync(0xFFFFFFFFu, to_text, hop);
        to_prompt += __shfl_xor_sync(0xFFFFFFFFu, to_prompt, hop);
    }
    if (lane() == 0) sums[0] += to_text, sums[1] += to_prompt;
}

// The vector of a block, and what a thread has found of the distances that share the vector's first number, and its last.
struct Vector {
    float* const at;  // null: none is wanted
    float first = 0.0f, last = 0.0f;

    static __device__ __forceinline__ bool has(const Problem& p, int32_t number) { return number > p.low && number < p.high; }
    __device__ __forceinline__ float before(const Problem& p, int32_t number) const { return has(p, number) ? at[number - p.low] : 0.0f; }
    __device__ __forceinline__ void add(const Problem& p, int32_t number, float before, float sum) {
        if (has(p, number)) at[number - p.low] = before + sum;
        else if (number <= p.low) first += sum;
        else last += sum;
    }
    // of a tile whose numbers are all the first, or the last
    template <int M, int N>
    __device__ __forceinline__ void add(bool the_first, const float (&x)[M][N][4]) {
        float sums[4] = {};
        each<M, N>([&](int m, int n, int e) { sums[e] += x[m][n][e]; });
        (the_first ? first : last) += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
};

// Of all warps, to the vector: of queries [i, i + I) and keys [j, j + J), from number `first` on.
template <class L>
__device__ __forceinline__ void add_diagonals(Vector& vector, const Problem& p, const float* folds, int32_t first) {
    constexpr int COUNT = L::ROWS + L::ACROSS - 1, HOPS = (COUNT + L::THREADS - 1) / L::THREADS;
    const auto own = static_cast<int>(threadIdx.x);
    float before[HOPS];
#pragma unroll
    for (int hop = 0; hop < HOPS; hop++) before[hop] = vector.before(p, first + hop * L::THREADS + own);
#pragma unroll
    for (int hop = 0; hop < HOPS; hop++) {
        if (hop * L::THREADS + own >= COUNT) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < L::WARPS; w++) {
            const int of_warp = hop * L::THREADS + own - 16 * L::M * (L::WARPS - 1 - w);
            if (of_warp < 0 || of_warp >= 16 * L::M + L::ACROSS - 1) continue;
#pragma unroll
            for (int r = 0; r < 8; r++) sum += folds[(w * 8 + r) * L::FOLD + of_warp - r];
        }
        vector.add(p, first + hop * L::THREADS + own, before[hop], sum);
    }
}

// The same of a warpgroup's 64 x 64: it has as many diagonals as threads but one, and the next tile half of them again. Each belongs to one
// thread, whose sum of it stays in a register for two tiles, and goes to the vector once.
template <class L>
struct Running {
    float before = 0.0f, sum = 0.0f;

    // Of the tile that begins `along` further on than number `first`; the first one `begins`, the last one `ends`.
    __device__ __forceinline__ void add(Vector& vector, const Problem& p, const float* folds, int32_t first, int32_t along, bool begins, bool ends) {
        const int own = (static_cast<int>(threadIdx.x) - along) & 127, of_warp = own & ~31;
        const int32_t number = first + along + own;
        if (own >= 64 || begins) sum = 0.0f, before = vector.before(p, number);
        float sums[4] = {};
#pragma unroll
        for (int w = 0; w < 4; w++) {
            if (w < 2 ? of_warp == 0 : of_warp == 96) continue;  // none of this warp's is one of that one's
            const auto at = static_cast<uint32_t>(own - 16 * (3 - w));
            const float* const fold = folds + w * 8 * L::FOLD + (at < 79 ? at : 79);  // there are zeros
#pragma unroll
            for (int r = 0; r < 8; r++) sums[w] += fold[r * L::FOLD - r];
        }
        sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
        if (own < 64 || ends) vector.add(p, number, before, sum);
    }
};

// D of the warp's 16 M rows from `first` on, to each lane those of its own rows; also for `of_keys`, to `to`. Some lanes a row.
template <class S, int M, class T>
__device__ __forceinline__ void inner_of(float (&inner)[2 * M], float* to, const T* out, const T* grad, const Sequence& of, int32_t first) {
    constexpr int LANES = S::DIM <= 64 ? 8 : 16, ROWS = 32 / LANES;
    const int channel = lane() % LANES * 8;
#pragma unroll
    for (int at = 0; at < 16 * M; at += ROWS) {
        const int32_t i = first + at + lane() / LANES;
        float sum = 0.0f;
        if (i < of.s && channel < of.dim) {
            const Pack<T> a = load8<true>(out + i * of.step + channel), b = load8<true>(grad + i * of.step + channel);
#pragma unroll
            for (int k = 0; k < 8; k++) sum += to_float(a.at[k]) * to_float(b.at[k]);
        }
#pragma unroll
        for (int hop = LANES / 2; hop; hop /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, hop);
        if (i < of.s && channel == 0) to[i] = sum;
        const float mine = __shfl_sync(0xFFFFFFFFu, sum, g() % ROWS * LANES);
        if (g() / ROWS == at % 8 / ROWS) inner[at / 8] = mine;
    }
}

template <class T, class S>
__device__ __forceinline__ void of_queries_body(const Problem& p, const Gradients& to, uint32_t block, uint32_t tiles_of_one) {
    using L = QueriesLayout<S>;
    constexpr int M = L::M, N = L::N;
    extern __shared__ uint4 memory[];
    T *const qs = reinterpret_cast<T*>(aligned<S::ALIGN>(memory)), *const grads = qs + S::elements(L::ROWS);
    T *const ks = grads + S::elements(L::ROWS), *const vs = ks + 2 * S::elements(L::ACROSS);  // two of each
    float* const strips = reinterpret_cast<float*>(vs + 2 * S::elements(L::ACROSS));
    float* const folds = strips + 2 * L::STRIP;
    float* const constants = folds + L::FOLDS * L::FOLDED;  // four a warp: of the first and the last distance, and two across the prompt's edge
    zero(folds, L::FOLDS * L::FOLDED + 4 * L::WARPS);

    const auto parts = static_cast<uint32_t>(to.parts), part = block % parts;
    const int64_t head = block / parts;
    const int32_t numbers = p.high - p.low + 1;
    Vector vector{to.partial ? to.partial + (head * to.parts + part) * (numbers + (p.prompt ? 2 : 0)) : nullptr};
    for (int64_t item = part; item < p.sequences * tiles_of_one; item += to.parts) {
        const Sequence of(p, item / tiles_of_one, head);
        for (int64_t tile = tiles_of_one - 1 - item % tiles_of_one; tile * L::ROWS < of.s; tile += tiles_of_one) {
            const auto i0 = static_cast<int32_t>(tile * L::ROWS);
            const int32_t end = of.limit((i0 + L::ROWS < of.s ? i0 + L::ROWS : of.s) - 1), steps = end > 0 ? (end + L::ACROSS - 1) / L::ACROSS : 0;
            const int32_t begins = number<L::ROWS>(p, of, i0, 0);
            const Near<L::ROWS + L::ACROSS - 1, L::ACROSS> near(p, begins);
            // steps before `first` and from `last` on have one number as their bias
            const int32_t first = max(0, near.begin), last = near.count == UINT32_MAX ? steps : max(0, min(steps, near.begin + static_cast<int32_t>(near.count)));
            const T* const grad = of.queries(static_cast<const T*>(to.grad));
            Feed<L::ACROSS, L::THREADS, S, T, 2> kv(of, 0, end, of.keys(static_cast<const T*>(p.k)), of.keys(static_cast<const T*>(p.v)));
            Strip<L::ROWS, L::ACROSS, L::THREADS, L::ACROSS> bias(p, of, i0, 0);
            const auto load = [&](int32_t step) {
                kv.to(ks + step % 2 * S::elements(L::ACROSS), vs + step % 2 * S::elements(L::ACROSS));
                bias.to(p, strips + step % 2 * L::STRIP, step < first || step >= last);
                commit();
            };

            Running<L> running;
            const int32_t mixed = of.mixed_keys(p, i0);
            const auto diagonals = [&](int32_t step) {
                if (!vector.at || step < first || step >= last) return;
                const float* const found = folds + step % L::FOLDS * L::FOLDED;
                if constexpr (S::GROUP) running.add(vector, p, found, begins, step * L::ACROSS, step == first, step + 1 == last);
                else add_diagonals<L>(vector, p, found, begins + step * L::ACROSS);
            };
            float dq[M][S::TILES][4] = {}, lse[2 * M], inner[2 * M];
#pragma unroll
            for (int r = 0; r < 2 * M; r++) {
                const int32_t i = i0 + warp() * 16 * M + 8 * r + g();
                lse[r] = i < of.s ? to.lse[of.row + i] : INFINITY;
            }
            Feed<L::ROWS, L::THREADS, S, T, 1>(of, i0, of.s, of.queries(static_cast<const T*>(p.q))).to(qs);
            Feed<L::ROWS, L::THREADS, S, T, 1>(of, i0, of.s, grad).to(grads);
            if (steps) load(0);
            inner_of<S, M>(inner, to.inner + of.row, of.queries(static_cast<const T*>(to.out)), grad, of, i0 + warp() * 16 * M);
            for (int32_t step = 0; step < steps; step++) {
                wait(0);
                S::arrived();
                __syncthreads();  // these keys are there, and nobody is still at those before, in whose place the next ones go
                const int32_t j0 = step * L::ACROSS, at = step % 2 * S::elements(L::ACROSS);
                float x[M][N][4], y[M][N][4];
                S::template rows_by_rows<T>(x, qs, ks + at);
                S::template rows_by_rows<T>(y, grads, vs + at);
                if (step + 1 < steps) load(step + 1);
                diagonals(step - 1);
                const bool some = padded<L::ACROSS>(p, of, j0);
                S::finish(x, y);
                const bool alone = step < first || step >= last;
                score<false, L::ROWS>(x, p, of, i0, j0, j0 < mixed, alone, p.bias ? strips + step % 2 * L::STRIP : nullptr,
                                      [&](int m, int, int e) { return lse[2 * m + e / 2]; });
                if (some || j0 + L::ACROSS > of.limit(i0)) hide<false>(x, p, of, i0 + warp() * 16 * M, j0);
                each_kept<false, M, N>(p, of.row + i0 + warp() * 16 * M, j0, [&](int m, int n, int e, bool keep) {
                    const int r = 2 * m + e / 2;
                    x[m][n][e] = quick_exp2(x[m][n][e]) * ((keep ? y[m][n][e] * p.kept : 0.0f) - inner[r]);
                });
                S::template weights_by_rows<T>(dq, x, ks + at);
                if (vector.at && alone) {
                    vector.add(step < first, x);
                } else if (vector.at) {
                    if (L::FOLDS == 1) __syncthreads();  // those of the last step are added up
                    if (j0 < mixed) set_apart(x, p, of, i0 + warp() * 16 * M, j0, constants + 4 * warp() + 2);
                    store_diagonals<M, N, L::FOLD>(folds + step % L::FOLDS * L::FOLDED + warp() * 8 * L::FOLD, x);
                }
                S::finish(dq);
            }
            wait(0);
            __syncthreads();  // as in the forward
            diagonals(steps - 1);
            const float scale = p.scale / LOG2E;
            const Sequence there = of.beside(to.beside);
            put_rows<S, M>(there.queries(static_cast<T*>(to.dq)), qs, dq, there, i0, of.s, [&](int) { return scale; });
            __syncthreads();
        }
    }
    if (!vector.at) return;
#pragma unroll
    for (int hop = 16; hop; hop /= 2) {
        vector.first += __shfl_xor_sync(0xFFFFFFFFu, vector.first, hop);
        vector.last += __shfl_xor_sync(0xFFFFFFFFu, vector.last, hop);
    }
    if (lane() == 0) constants[4 * warp()] = vector.first, constants[4 * warp() + 1] = vector.last;
    __syncthreads();
    const auto own = static_cast<int32_t>(threadIdx.x);
    if (own < 2 ? own < numbers : own < 4 && p.prompt) {
        float sum = 0.0f;
        for (int w = 0; w < L::WARPS; w++) sum += constants[4 * w + own];
        vector.at[own == 0 ? 0 : numbers + own - 2] = sum;
    }
}

template <class T, class S>
__global__ __launch_bounds__(QueriesLayout<S>::THREADS, QueriesLayout<S>::BLOCKS) void of_queries(const Problem p, const Gradients to, uint32_t tiles_of_one) {
    if constexpr (ABLE<T, S>) of_queries_body<T, S>(p, to, blockIdx.x, tiles_of_one);
}

// ---- all of a head by one block, on Hopper, without a bias: up to 512 queries, whose dQ stays in its shared memory

#ifdef MC_HOPPER
constexpr int32_t QUERIES = 512;

// Warpgroups 0 and 1 have 64 keys each, as left factors in registers, and go through the queries: P, dV, dS and dK, as above. What the
// next needs for dQ it reads from shared memory: dS of both, whose keys it adds up in their order. Of the last one a thread asks the
// copy engine for all tiles, and three warps find D of the next sequence. So nothing is multiplied twice, and no sum is another
// block's: five products, not seven.
template <class T>
struct Whole {
    static constexpr int THREADS = 512, STAGES = 3, TILE = 64 * 64;
    using Tiles = Ring<T, STAGES, 8>;  // of keys and values, of queries and the result's gradients
    static constexpr size_t BYTES =
        1024 - 16 + sizeof(T) * 4 * TILE + Tiles::BYTES + sizeof(float) * (64 * QUERIES + 4 * QUERIES) + 10 * sizeof(Barrier);
};

// Sequences of all heads, of which a block does every so many. (What is marked only code for Hopper uses.)
[[maybe_unused]] __device__ __forceinline__ uint32_t pairs(const Problem& p) { return static_cast<uint32_t>(p.sequences * p.heads); }

// Tiles of queries, one at least, whatever is there; the first of those that see one of the keys from j0 on, and of which all see what is
// before them. Lengths that are not as was said are cut.
__device__ __forceinline__ int32_t query_tiles(const Sequence& of) { return of.s > 64 ? (of.s < QUERIES ? of.s + 63 : QUERIES) / 64 : 1; }
[[maybe_unused]] __device__ __forceinline__ int32_t first_tile(const Sequence& of, int32_t j0) {
    const int32_t first = j0 ? of.viewer(j0) / 64 : 0, last = query_tiles(of) - 1;
    return first < last ? first : last;
}

// D of a row, by eight lanes. `numbers` has of two queries what lse holds, then D of the two.
template <class T>
struct Inner {
    Pack<T> a, b;

    __device__ __forceinline__ Inner(const Gradients& to, const Sequence& of, int32_t row) : a{}, b{} {
        const int channel = lane() % 8 * 8;
        if (row >= of.s || channel >= of.dim) return;
        a = load8<true>(of.queries(static_cast<const T*>(to.out)) + row * of.step + channel);
        b = load8<true>(of.queries(static_cast<const T*>(to.grad)) + row * of.step + channel);
    }
    __device__ __forceinline__ void put(float* numbers, int32_t row) const {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < 8; k++) sum += to_float(a.at[k]) * to_float(b.at[k]);
#pragma unroll
        for (int hop = 4; hop; hop /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, hop);
        if (lane() % 8 == 0 && row < QUERIES) numbers[row / 2 * 4 + row % 2 + 2] = sum;
    }
};

// The numbers of a sequence, by `warps` warps of which this one is number `own`. What D is made of is asked for first: it then comes out of
// the second cache, and few registers suffice.
template <class T>
__device__ __forceinline__ void find_numbers(float* numbers, const Gradients& to, const Sequence& of, int own, int warps) {
    const int32_t rows = 64 * query_tiles(of);
    for (int32_t row = own * 32 + lane(); row < rows; row += 32 * warps) {
        numbers[row / 2 * 4 + row % 2] = row < of.s ? to.lse[of.row + row] : INFINITY;
        if (row < of.s) ahead(of.queries(static_cast<const T*>(to.out)) + row * of.step), ahead(of.queries(static_cast<const T*>(to.grad)) + row * of.step);
    }
    for (int32_t row = own * 8 + lane() / 8; row < rows; row += 8 * warps) {
        const Inner<T> one(to, of, row), other(to, of, row + 4);
        one.put(numbers, row), other.put(numbers, row + 4);
    }
}

template <class T>
struct Memory {
    using L = Whole<T>;
    T *ds, *ks;
    typename L::Tiles tiles;
    float *sums, *numbers;    // 16 KiB a tile of queries; two sequences'
    Barrier *full, *empty;    // dS of warpgroup 0, of 1
    Barrier *ready, *spent;   // two each, in turns: numbers, and nobody is at them
    Barrier *keys, *free;     // those that dQ is made of, likewise

    __device__ __forceinline__ Memory(uint4* memory)
        : ds(reinterpret_cast<T*>(aligned<1024>(memory))), ks(ds + 2 * L::TILE), tiles(ks + 2 * L::TILE),
          sums(reinterpret_cast<float*>(tiles.empty + L::STAGES)), numbers(sums + 64 * QUERIES),
          full(reinterpret_cast<Barrier*>(numbers + 4 * QUERIES)), empty(full + 2), ready(empty + 2), spent(ready + 2), keys(spent + 2),
          free(keys + 1) {}
};

// dK and dV, by warpgroups 0 and 1
template <class T>
__device__ __forceinline__ void keys_of_heads(const Problem& p, const Gradients& to, Memory<T>& m) {
    using L = Whole<T>;
    using S = Groups<64>;
    const int group = static_cast<int>(threadIdx.x / 128);
    T* const ds = m.ds + group * L::TILE;
    uint32_t turn = 0, stored = 0;
    for (uint32_t pair = blockIdx.x; pair < pairs(p); pair += gridDim.x, turn++) {
        const Sequence of(p, pair);
        const int32_t last = query_tiles(of);
        const float* const numbers = m.numbers + turn % 2 * 2 * QUERIES + 4 * c();
        if (turn) wait_until(m.ready + turn % 2, (turn - 1) / 2 % 2);
        for (int32_t j0 = 0; j0 == 0 || j0 < of.t; j0 += 128) {
            typename S::Rows keys, values;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                T* const k = m.tiles.next();
                if (half == group) {
                    const int32_t rows = of.t - j0 - 64 * group;
                    if (rows < 64) clear<S>(k, rows, group), clear<S>(k + L::TILE, rows, group);
                    S::template take<T>(keys, k), S::template take<T>(values, k + L::TILE);
                }
                m.tiles.leave();
            }
            float x[1][8][4], y[1][8][4], dk[1][S::TILES][4] = {}, dv[1][S::TILES][4] = {};
            const int32_t first = first_tile(of, j0);
            const auto next = [&](int32_t step) {
                T* const q = m.tiles.next();
                const int32_t rows = of.s - 64 * step;
                if (rows < 64) clear<S>(q, rows, group), clear<S>(q + L::TILE, rows, group);
                S::template rows_by_rows<T>(x, keys, q);
            };
            S::hold(dk), S::hold(dv);
            next(first);
            S::template rows_by_rows<T>(y, values, m.tiles.last() + L::TILE);
            for (int32_t step = first;;) {
                const int32_t i0 = 64 * step;
                const float* const of_these = numbers + 2 * i0;
                S::template finish_but<1>(x);
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    const float2 lse = *reinterpret_cast<const float2*>(of_these + 16 * n);
#pragma unroll
                    for (int e = 0; e < 4; e++) x[0][n][e] = fmaf(x[0][n][e], p.scale, -(e % 2 ? lse.y : lse.x));
                }
                if (j0 + 64 * group + 64 > of.limit(i0)) hide<true>(x, p, of, i0, j0 + warp() * 16);
                each<1, 8>([&](int m, int n, int e) { x[m][n][e] = quick_exp2(x[m][n][e]); });
                if (stored) wait_until(m.empty + group, (stored - 1) % 2);
                stored++;
                S::finish(y);
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    const float2 inner = *reinterpret_cast<const float2*>(of_these + 16 * n + 2);
#pragma unroll
                    for (int e = 0; e < 4; e++) y[0][n][e] = (y[0][n][e] - (e % 2 ? inner.y : inner.x)) * x[0][n][e];
                }
                typename S::Left left, other;
                S::template round<T>(left, x), S::template round<T>(other, y);
#pragma unroll
                for (int k = 0; k < 4; k++) store_matrices(ds + S::place(warp() % 4 * 16 + lane() % 16, 16 * k + lane() / 16 * 8), other[k]);
                S::arrived();
                __syncwarp();
                if (lane() == 0) arrive(m.full + group);
                T* const q = m.tiles.last();
                S::template left_by_rows<T>(dv, left, q + L::TILE);
                S::template left_by_rows<T>(dk, other, q);
                if (++step == last) break;
                next(step);
                S::template finish_but<1>(dk, dv);
                m.tiles.leave();
                S::template rows_by_rows<T>(y, values, m.tiles.last() + L::TILE);
            }
            S::finish(dk, dv);
            m.tiles.leave();
            wait_until(m.empty + group, (stored - 1) % 2);  // dS has been read: the results go there
            const float scale = p.scale / LOG2E;
            const Sequence there = of.beside(to.beside);
            put_rows<S, 1>(there.keys(static_cast<T*>(to.dk)), m.ds, dk, there, j0, of.t, [&](int) { return scale; });
            put_rows<S, 1>(there.keys(static_cast<T*>(to.dv)), m.ds, dv, there, j0, of.t, [&](int) { return p.kept; });
        }
        __syncwarp();
        if (lane() == 0) arrive(m.spent + turn % 2);
    }
}

// dQ, by warpgroup 2
template <class T>
__device__ __forceinline__ void queries_of_heads(const Problem& p, const Gradients& to, Memory<T>& m) {
    using L = Whole<T>;
    using S = Groups<64>;
    const int own = warp() - 8;
    uint32_t used = 0, blocks = 0;
    for (uint32_t pair = blockIdx.x; pair < pairs(p); pair += gridDim.x) {
        const Sequence of(p, pair);
        const int32_t last = query_tiles(of);
        for (int32_t j0 = 0; j0 == 0 || j0 < of.t; j0 += 128) {
            wait_until(m.keys, blocks++ % 2);
            if (j0 + 128 > of.t)
                for (int half = 0; half < 2; half++)
                    if (of.t - j0 - 64 * half < 64) clear<S>(m.ks + half * L::TILE, of.t - j0 - 64 * half, 2);
            const int32_t done = j0 + 128 >= of.t ? last : first_tile(of, j0 + 128);  // tiles before this one see no later keys
            for (int32_t step = first_tile(of, j0); step < last; step++) {
                float* const place = m.sums + step * 64 * 64 + own * 16 * 64;
                float sums[1][8][4] = {};
                if (j0)
#pragma unroll
                    for (int n = 0; n < 8; n++) {
                        const float4 four = *reinterpret_cast<const float4*>(place + 128 * n + 4 * lane());
                        sums[0][n][0] = four.x, sums[0][n][1] = four.y, sums[0][n][2] = four.z, sums[0][n][3] = four.w;
                    }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    wait_until(m.full + half, used % 2);
                    S::template columns_by_rows<T>(sums, m.ds + half * L::TILE, m.ks + half * L::TILE);
                }
                used++;
                S::finish(sums);
                __syncwarp();
                if (lane() < 2) arrive(m.empty + lane());
                if (step < done) {
                    const float scale = p.scale / LOG2E;
                    T* const rows = reinterpret_cast<T*>(place) - warp() * 16 * 64;
                    const Sequence there = of.beside(to.beside);
                    put_rows<S, 1>(there.queries(static_cast<T*>(to.dq)), rows, sums, there, 64 * step - 128, of.s, [&](int) { return scale; });
                } else {
#pragma unroll
                    for (int n = 0; n < 8; n++)
                        *reinterpret_cast<float4*>(place + 128 * n + 4 * lane()) = make_float4(sums[0][n][0], sums[0][n][1], sums[0][n][2], sums[0][n][3]);
                }
            }
            __syncwarp();
            if (lane() == 0) arrive(m.free);
        }
    }
}

// What all read, by a thread
template <class T>
__device__ __forceinline__ void tiles_of_heads(const Maps& maps, const Problem& p, Memory<T>& m) {
    using L = Whole<T>;
    uint32_t blocks = 0;
    for (uint32_t pair = blockIdx.x; pair < pairs(p); pair += gridDim.x) {
        const Sequence of(p, pair);
        const int32_t last = query_tiles(of);
        const auto q0 = static_cast<int32_t>(of.q0), k0 = static_cast<int32_t>(of.k0);
        for (int32_t j0 = 0; j0 == 0 || j0 < of.t; j0 += 128, blocks++) {
            for (int32_t half = 0; half < 2; half++) m.tiles.ask(maps.k, maps.v, of.head, k0 + j0 + 64 * half);
            const int32_t first = first_tile(of, j0);
            for (int32_t step = first; step < last; step++) {
                m.tiles.ask(maps.q, maps.grad, of.head, q0 + 64 * step);
                if (step > first) continue;
                if (blocks) wait_until(m.free, (blocks - 1) % 2);
                expect(m.keys, 2 * sizeof(T) * L::TILE);
                for (int i = 0; i < 2; i++) copy_tile(m.ks + i * L::TILE, maps.k, m.keys, of.head, k0 + j0 + 64 * i);
            }
        }
    }
}

// D of the next sequence, by three warps
template <class T>
__device__ __forceinline__ void numbers_of_heads(const Problem& p, const Gradients& to, Memory<T>& m) {
    uint32_t turn = 0;
    for (uint32_t pair = blockIdx.x + gridDim.x; pair < pairs(p); pair += gridDim.x, turn++) {
        const Sequence of(p, pair);
        if (turn) wait_until(m.spent + (turn - 1) % 2, (turn - 1) / 2 % 2);
        find_numbers<T>(m.numbers + (turn + 1) % 2 * 2 * QUERIES, to, of, warp() - 13, 3);
        __syncwarp();
        if (lane() == 0) arrive(m.ready + (turn + 1) % 2);
    }
}

template <class T>
__global__ __launch_bounds__(Whole<T>::THREADS, 1) void of_heads(const __grid_constant__ Maps maps, const Problem p, const Gradients to) {
#if defined(MC_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using L = Whole<T>;
    extern __shared__ uint4 memory[];
    Memory<T> m(memory);
    if (threadIdx.x == 0) {
        m.tiles.begin_all();
        for (int i = 0; i < 2; i++) begin(m.full + i, 4), begin(m.empty + i, 4), begin(m.ready + i, 3), begin(m.spent + i, 8);
        begin(m.keys, 1), begin(m.free, 4), begun();
    }
    find_numbers<T>(m.numbers, to, Sequence(p, blockIdx.x), warp(), L::THREADS / 32);
    __syncthreads();
    if (warp() < 8) {
        more_registers<208>();
        keys_of_heads<T>(p, to, m);
    } else if (warp() < 12) {
        fewer_registers<64>();
        queries_of_heads<T>(p, to, m);
    } else {
        fewer_registers<32>();
        if (threadIdx.x == 384) tiles_of_heads<T>(maps, p, m);
        if (warp() > 12) numbers_of_heads<T>(p, to, m);
    }
#endif
}

// Whether it is for this problem, which then is done. Fewer queries, and causality, leave its blocks too little to do at once, as does a last
// round of few of them.
inline bool by_heads(Call& call, int chip, const Problem& p, Dtype dtype, const Gradients& to) {
    const int64_t pairs = p.sequences * p.heads, most = multiprocessors();
    Maps maps;
    if (p.bias || p.causal || p.longest_q <= 320 || p.longest_q > QUERIES || p.longest_k < 128) return false;
    if (pairs < most || 20 * pairs < 17 * tiles(pairs, most) * most) return false;
    if (pairs > INT32_MAX || !described(maps, chip, p, to.grad)) return false;
    MC_FOR_HALF(dtype, T, { launch<Whole<T>>(call, of_heads<T>, most, maps, p, to); })
    return true;
}
#endif

// `there` numbers of a head are in a part, from number `low` on; those before and behind, up to the prompt's, are zero.
__global__ __launch_bounds__(THREADS) void add_up(const Problem p, const float* partial, float* sum, int64_t parts, int64_t there) {
    const int64_t gap = p.numbers - there;
    for (int64_t at = int64_t{blockIdx.x} * THREADS + threadIdx.x; at < p.heads * p.numbers; at += int64_t{gridDim.x} * THREADS) {
        const int64_t number = at % p.numbers, own = number < p.distances ? number - p.low : number - gap;
        const bool read = number >= p.distances || (number >= p.low && number <= p.high);
        const float* from = partial + at / p.numbers * parts * there + own;
        float total = 0.0f;
#pragma unroll 8
        for (int64_t part = 0; part < (read ? parts : 0); part++) total += from[part * there];
        sum[at] = total;
    }
}

}  // namespace

MC_KERNEL(relative_attention_backward) {
    Array q;
    const Problem p = read(call, q);
    Gradients to{};
    const Shape rows{p.batch, p.heads, p.s}, keys{p.batch, p.t, p.heads, q.shape.at[3]};
    const Array out = call.in("out", q.dtype, q.shape), lse = call.in("lse", F32, rows), grad = call.in("grad", q.dtype, q.shape);
    const Array inner = call.out("inner", F32, rows);
    const Array dq = call.maybe_out("dq", q.dtype, q.shape), dk = call.maybe_out("dk", q.dtype, keys), dv = call.maybe_out("dv", q.dtype, keys);
    const Array beside = call.maybe_out("beside", q.dtype, Shape{p.batch, p.s, 3, p.heads, q.shape.at[3]});
    to.parts = call.integer("parts", 0);
    const int64_t there = p.high - p.low + 1 + (p.prompt ? 2 : 0);
    const Array partial = call.maybe_out("partial", F32, Shape{p.heads, to.parts, there});
    const Array dbias = call.maybe_out("dbias", F32, Shape{p.heads, p.numbers});
    call.ready();
    if (partial.given != dbias.given || (dbias && dbias.shape.count() && !p.bias)) call.refuse("partial and dbias go together, and with a bias");
    if (dq.given == beside.given || dk.given != dq.given || dv.given != dq.given) call.refuse("dq, dk and dv go together, or beside alone");
    if (beside && p.s != p.t) call.refuse("beside: %lld queries and %lld keys", static_cast<long long>(p.s), static_cast<long long>(p.t));
    if (!out.aligned() || !grad.aligned() || !dq.aligned() || !dk.aligned() || !dv.aligned() || !beside.aligned())
        call.refuse("out, grad, dq, dk, dv or beside: not aligned to 16 bytes");
    const int chip = check_chip(call, q.dtype);
    to.out = out.data, to.grad = grad.data, to.lse = lse.as<float>(), to.inner = inner.as<float>();
    to.dq = dq.data, to.dk = dk.data, to.dv = dv.data, to.beside = 1, to.partial = partial.as<float>();
    if (beside) {
        auto* const first = static_cast<uint16_t*>(beside.data);
        to.dq = first, to.dk = first + p.heads * p.dim, to.dv = first + 2 * p.heads * p.dim, to.beside = 3;
    }
    const auto stream = static_cast<cudaStream_t>(call.stream);
    bool done = false;
#ifdef MC_HOPPER
    done = by_heads(call, chip, p, q.dtype, to);
#endif
    if (!done) MC_FOR_TILES(chip, q.dtype, p.dim, T, S, {
        const int64_t by_keys = tiles(p.longest_k, KeysLayout<S>::ROWS), by_queries = tiles(p.longest_q, QueriesLayout<S>::ROWS);
        if (!partial) to.parts = p.sequences * by_queries;
        if (p.heads && to.parts && by_queries)  // first: it finds `inner`
            launch<QueriesLayout<S>>(call, of_queries<T, S>, p.heads * to.parts, p, to, by_queries);
        if (p.sequences && p.heads && by_keys)
            launch<KeysLayout<S>>(call, of_keys<T, S>, p.sequences * p.heads * by_keys, p, to, by_keys);
    })
    if (dbias && p.heads && p.numbers)
        add_up<<<grid(p.heads * p.numbers, THREADS), THREADS, 0, stream>>>(p, partial.as<float>(), dbias.as<float>(), to.parts, there);
}
