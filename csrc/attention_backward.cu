// Attention with a relative bias on tensor cores, backward: with P the probabilities, M the dropout mask over 1 - p,
// dP = M * (dO V^T) and D = sum(dO * O) of each row,
//
//     dS = P * (dP - D),   dV = (M * P)^T dO,   dK = dS^T Q scale,   dQ = dS K scale,   dbias[key - query] = sums of dS's diagonals
//
// P is computed again, twice: `of_keys` has a block for some keys that goes through all queries, `of_queries` one for some queries
// that goes through all keys. So every gradient is summed up by one block in its order, without an atomic: two runs are equal to the
// bit (two more products than five, instead of sums in memory). The first computes transposed, keys in rows: then M P and dS are in
// both the left factors of the products that follow, and go through no shared memory.
//
// A thread's numbers of dS lie on 2 (2 M + N - 1) diagonals, along which it adds them up in registers; what the 32 lanes found goes to
// shared memory as 8 rows, of columns 2 c + e modulo 8, which are added up by a thread a diagonal. That sum goes to `partial`: some
// vectors for each head, of which a block has one to itself for all the queries it does, however many; `add_up` makes one of them.
// So memory grows with the length and not with its square.
#include "attention.h"

namespace {

constexpr int THREADS = 128;  // of what is no product

// D, and nothing else: sum(dO * O) of every row of b s h, laid out b h s. 16 lanes a row.
template <class T>
__global__ __launch_bounds__(THREADS) void inner_of(const T* out, const T* grad, float* inner, int64_t rows, int64_t s, int64_t heads, int dim) {
    const int64_t row = int64_t{blockIdx.x} * (THREADS / 16) + threadIdx.x / 16;
    const int channel = static_cast<int>(threadIdx.x) % 16 * 8;
    float sum = 0.0f;
    if (row < rows && channel < dim) {
        const int64_t at = row * dim + channel;
        const Pack<T> a = load8<true>(out + at);
        const Pack<T> b = load8<true>(grad + at);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += to_float(a.at[i]) * to_float(b.at[i]);
    }
#pragma unroll
    for (int hop = 8; hop; hop /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, hop);
    if (row < rows && channel == 0) inner[(row / heads / s * heads + row % heads) * s + row / heads % s] = sum;
}

struct Gradients {
    const void* grad;
    const float *lse, *inner;
    void *dq, *dk, *dv;
    float* partial;  // (heads, parts, distances), zero at first, or null
    int64_t parts;   // blocks of a head
};

// ---- dK and dV

template <class S>
struct KeysLayout : Block<S, typename S::OfKeys> {
    using B = Block<S, typename S::OfKeys>;
    static constexpr size_t BYTES = S::ALIGN - 16 + 2 * B::OWN + 4 * B::OTHER + 2 * sizeof(float) * (B::STRIP + 2 * B::ACROSS);
};

template <class T, class S>
__device__ __forceinline__ void of_keys_body(const Problem& p, const Gradients& to, int64_t block, int64_t tiles_of_one) {
    using L = KeysLayout<S>;
    constexpr int M = L::M, N = L::N;
    extern __shared__ uint4 memory[];
    T *const ks = reinterpret_cast<T*>(aligned<S::ALIGN>(memory)), *const vs = ks + S::elements(L::ROWS);
    T *const qs = vs + S::elements(L::ROWS), *const grads = qs + 2 * S::elements(L::ACROSS);  // two of each
    float* const strips = reinterpret_cast<float*>(grads + 2 * S::elements(L::ACROSS));
    float *const lses = strips + 2 * L::STRIP, *const inners = lses + 2 * L::ACROSS;

    const int64_t pair = block / tiles_of_one;
    const Sequence of(p, pair / p.heads, pair % p.heads);
    const T *const q = of.queries(static_cast<const T*>(p.q)), *const grad = of.queries(static_cast<const T*>(to.grad));
    for (int64_t tile = block % tiles_of_one; tile * L::ROWS < of.t; tile += tiles_of_one) {
        const auto j0 = static_cast<int32_t>(tile * L::ROWS);
        const int32_t blind = of.causal ? j0 - (of.t - of.s) : 0;  // queries before this one see none of these keys
        const int32_t first = blind > 0 ? blind / L::ACROSS : 0, steps = (of.s + L::ACROSS - 1) / L::ACROSS;
        const auto load = [&](int32_t step) {
            const int32_t i0 = step * L::ACROSS, at = step % 2 * S::elements(L::ACROSS);
            load_rows<L::ACROSS, L::THREADS, S>(qs + at, q, of, i0, of.s);
            load_rows<L::ACROSS, L::THREADS, S>(grads + at, grad, of, i0, of.s);
            load_strip<L::ACROSS, L::ROWS, L::THREADS>(strips + step % 2 * L::STRIP, p, of, i0, j0);
            load_numbers<L::ACROSS, L::THREADS>(lses + step % 2 * L::ACROSS, to.lse + of.row, i0, of.s);
            load_numbers<L::ACROSS, L::THREADS>(inners + step % 2 * L::ACROSS, to.inner + of.row, i0, of.s);
            commit();
        };

        float dk[M][S::TILES][4] = {}, dv[M][S::TILES][4] = {};
        if (!p.bias) zero(strips, 2 * L::STRIP);
        load_rows<L::ROWS, L::THREADS, S>(ks, of.keys(static_cast<const T*>(p.k)), of, j0, of.t);
        load_rows<L::ROWS, L::THREADS, S>(vs, of.keys(static_cast<const T*>(p.v)), of, j0, of.t);
        if (first < steps) load(first);
        for (int32_t step = first; step < steps; step++) {
            wait(0);
            S::arrived();
            __syncthreads();  // these queries are there, and nobody is still at those before, in whose place the next ones go
            if (step + 1 < steps) load(step + 1);
            const int32_t i0 = step * L::ACROSS, at = step % 2 * S::elements(L::ACROSS);
            const float *const lse = lses + step % 2 * L::ACROSS + 2 * c(), *const inner = inners + step % 2 * L::ACROSS + 2 * c();
            float x[M][N][4], y[M][N][4];
            S::template rows_by_rows<T>(x, ks, qs + at);
            S::template rows_by_rows<T>(y, vs, grads + at);
            S::finish(x, y);
            score<true, L::ROWS>(x, strips + step % 2 * L::STRIP, p.scale, [&](int, int n, int e) { return lse[8 * n + e % 2]; });
            if (p.seen || i0 + L::ACROSS > of.s || j0 + L::ROWS > of.limit(i0))
                each<M, N>([&](int m, int n, int e) {
                    const int32_t j = j0 + warp() * 16 * M + 16 * m + e / 2 * 8 + g(), i = i0 + 8 * n + 2 * c() + e % 2;
                    if (i >= of.s || j >= of.limit(i) || (p.seen && !p.seen[of.k0 + j])) x[m][n][e] = -INFINITY;
                });
            each_kept<true, M, N>(p, of.row + i0, j0 + warp() * 16 * M, [&](int m, int n, int e, bool keep) {
                const float weight = quick_exp2(x[m][n][e]);
                y[m][n][e] = weight * ((keep ? y[m][n][e] * p.kept : 0.0f) - inner[8 * n + e % 2]);
                x[m][n][e] = keep ? weight : 0.0f;
            });
            S::template weights_by_rows<T>(dv, x, grads + at);
            S::template weights_by_rows<T>(dk, y, qs + at);
            S::finish(dv, dk);
        }
        wait(0);
        __syncthreads();  // as in the forward
        const float scale = p.scale / LOG2E;
        put_rows<S, M>(of.keys(static_cast<T*>(to.dk)), ks, dk, of, j0, of.t, [&](int) { return scale; });
        put_rows<S, M>(of.keys(static_cast<T*>(to.dv)), vs, dv, of, j0, of.t, [&](int) { return p.kept; });
        __syncthreads();
    }
}

template <class T, class S>
__global__ __launch_bounds__(KeysLayout<S>::THREADS, KeysLayout<S>::BLOCKS) void of_keys(const Problem p, const Gradients to, int64_t tiles_of_one) {
    if constexpr (ABLE<T, S>) of_keys_body<T, S>(p, to, blockIdx.x, tiles_of_one);
}

// ---- dQ and the bias

template <class S>
struct QueriesLayout : Block<S, typename S::OfQueries> {
    using B = Block<S, typename S::OfQueries>;
    static constexpr int SLOTS = 2 * B::M + B::N - 1;  // diagonals of 8 x 8 blocks in a warp's 16 M x 8 N
    // 4 modulo 16: what a warp stores at once lies in different banks. The last 12 are zeros, also as what is left of the next row.
    static constexpr int FOLD = 8 * SLOTS + 12;
    static_assert(FOLD % 16 == 4);
    static constexpr size_t BYTES = S::ALIGN - 16 + 2 * B::OWN + 4 * B::OTHER + sizeof(float) * (2 * B::STRIP + B::WARPS * 8 * FOLD);
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

// Of all warps, to the vector: of queries [i, i + I) and keys [j, j + J).
template <class L>
__device__ __forceinline__ void add_diagonals(float* vector, const float* folds, const Problem& p, const Sequence& of, int32_t i, int32_t j) {
    const auto first = static_cast<int32_t>(p.longest_k - of.t + of.s - L::ROWS) + j - i;
    const auto distances = static_cast<uint32_t>(p.distances());
#pragma unroll
    for (int hop = 0; hop < L::ROWS + L::ACROSS - 1; hop += L::THREADS) {
        const int at = hop + static_cast<int>(threadIdx.x);
        const auto distance = static_cast<uint32_t>(first + at);
        if (at >= L::ROWS + L::ACROSS - 1 || distance >= distances) continue;
        float sum = vector[distance];
#pragma unroll
        for (int w = 0; w < L::WARPS; w++) {
            const int own = at - 16 * L::M * (L::WARPS - 1 - w);
            if (own < 0 || own >= 16 * L::M + L::ACROSS - 1) continue;
#pragma unroll
            for (int r = 0; r < 8; r++) sum += folds[(w * 8 + r) * L::FOLD + own - r];
        }
        vector[distance] = sum;
    }
}

template <class T, class S>
__device__ __forceinline__ void of_queries_body(const Problem& p, const Gradients& to, int64_t block, int64_t tiles_of_one) {
    using L = QueriesLayout<S>;
    constexpr int M = L::M, N = L::N;
    extern __shared__ uint4 memory[];
    T *const qs = reinterpret_cast<T*>(aligned<S::ALIGN>(memory)), *const grads = qs + S::elements(L::ROWS);
    T *const ks = grads + S::elements(L::ROWS), *const vs = ks + 2 * S::elements(L::ACROSS);  // two of each
    float* const strips = reinterpret_cast<float*>(vs + 2 * S::elements(L::ACROSS));
    float* const folds = strips + 2 * L::STRIP;
    zero(folds, L::WARPS * 8 * L::FOLD);

    const int64_t head = block / to.parts, part = block % to.parts;
    float* const vector = to.partial ? to.partial + (head * to.parts + part) * p.distances() : nullptr;
    for (int64_t item = part; item < p.sequences * tiles_of_one; item += to.parts) {
        const Sequence of(p, item / tiles_of_one, head);
        for (int64_t tile = tiles_of_one - 1 - item % tiles_of_one; tile * L::ROWS < of.s; tile += tiles_of_one) {
            const auto i0 = static_cast<int32_t>(tile * L::ROWS), last = i0 + L::ROWS < of.s ? i0 + L::ROWS : of.s;
            const int32_t end = of.limit(last - 1), steps = end > 0 ? (end + L::ACROSS - 1) / L::ACROSS : 0;
            const T *const k = of.keys(static_cast<const T*>(p.k)), *const v = of.keys(static_cast<const T*>(p.v));
            const auto load = [&](int32_t step) {
                const int32_t j0 = step * L::ACROSS, at = step % 2 * S::elements(L::ACROSS);
                load_rows<L::ACROSS, L::THREADS, S>(ks + at, k, of, j0, end);
                load_rows<L::ACROSS, L::THREADS, S>(vs + at, v, of, j0, end);
                load_strip<L::ROWS, L::ACROSS, L::THREADS>(strips + step % 2 * L::STRIP, p, of, i0, j0);
                commit();
            };

            float dq[M][S::TILES][4] = {}, lse[2 * M], inner[2 * M];
#pragma unroll
            for (int r = 0; r < 2 * M; r++) {
                const int32_t i = i0 + warp() * 16 * M + 8 * r + g();
                lse[r] = i < of.s ? to.lse[of.row + i] : INFINITY, inner[r] = i < of.s ? to.inner[of.row + i] : 0.0f;
            }
            if (!p.bias) zero(strips, 2 * L::STRIP);
            load_rows<L::ROWS, L::THREADS, S>(qs, of.queries(static_cast<const T*>(p.q)), of, i0, of.s);
            load_rows<L::ROWS, L::THREADS, S>(grads, of.queries(static_cast<const T*>(to.grad)), of, i0, of.s);
            if (steps) load(0);
            for (int32_t step = 0; step < steps; step++) {
                wait(0);
                S::arrived();
                __syncthreads();  // these keys are there, and nobody is still at those before, in whose place the next ones go
                const int32_t j0 = step * L::ACROSS, at = step % 2 * S::elements(L::ACROSS);
                float x[M][N][4], y[M][N][4];
                S::template rows_by_rows<T>(x, qs, ks + at);
                S::template rows_by_rows<T>(y, grads, vs + at);
                if (step + 1 < steps) load(step + 1);
                S::finish(x, y);
                score<false, L::ROWS>(x, strips + step % 2 * L::STRIP, p.scale, [&](int m, int, int e) { return lse[2 * m + e / 2]; });
                if (p.seen || j0 + L::ACROSS > of.limit(i0))
                    each<M, N>([&](int m, int n, int e) {
                        const int32_t i = i0 + warp() * 16 * M + 16 * m + e / 2 * 8 + g(), j = j0 + 8 * n + 2 * c() + e % 2;
                        if (j >= of.limit(i) || (p.seen && !p.seen[of.k0 + j])) x[m][n][e] = -INFINITY;
                    });
                each_kept<false, M, N>(p, of.row + i0 + warp() * 16 * M, j0, [&](int m, int n, int e, bool keep) {
                    const int r = 2 * m + e / 2;
                    x[m][n][e] = quick_exp2(x[m][n][e]) * ((keep ? y[m][n][e] * p.kept : 0.0f) - inner[r]);
                });
                S::template weights_by_rows<T>(dq, x, ks + at);
                if (vector) {
                    store_diagonals<M, N, L::FOLD>(folds + warp() * 8 * L::FOLD, x);
                    __syncthreads();
                    add_diagonals<L>(vector, folds, p, of, i0, j0);  // before the next barrier, behind which they are new
                }
                S::finish(dq);
            }
            wait(0);
            __syncthreads();  // as in the forward
            const float scale = p.scale / LOG2E;
            put_rows<S, M>(of.queries(static_cast<T*>(to.dq)), qs, dq, of, i0, of.s, [&](int) { return scale; });
            __syncthreads();
        }
    }
}

template <class T, class S>
__global__ __launch_bounds__(QueriesLayout<S>::THREADS, QueriesLayout<S>::BLOCKS) void of_queries(const Problem p, const Gradients to, int64_t tiles_of_one) {
    if constexpr (ABLE<T, S>) of_queries_body<T, S>(p, to, blockIdx.x, tiles_of_one);
}

__global__ __launch_bounds__(THREADS) void add_up(const float* partial, float* sum, int64_t heads, int64_t parts, int64_t distances) {
    for (int64_t at = int64_t{blockIdx.x} * THREADS + threadIdx.x; at < heads * distances; at += int64_t{gridDim.x} * THREADS) {
        const float* from = partial + at / distances * parts * distances + at % distances;
        float total = 0.0f;
#pragma unroll 8
        for (int64_t part = 0; part < parts; part++) total += from[part * distances];
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
    const Array dq = call.out("dq", q.dtype, q.shape), dk = call.out("dk", q.dtype, keys), dv = call.out("dv", q.dtype, keys);
    to.parts = call.integer("parts", 0);
    const Array partial = call.maybe_out("partial", F32, Shape{p.heads, to.parts, p.distances()});
    const Array dbias = call.maybe_out("dbias", F32, Shape{p.heads, p.distances()});
    call.ready();
    if (partial.given != dbias.given || (dbias && dbias.shape.count() && !p.bias)) call.refuse("partial and dbias go together, and with a bias");
    if (!out.aligned() || !grad.aligned() || !dq.aligned() || !dk.aligned() || !dv.aligned())
        call.refuse("out, grad, dq, dk or dv: not aligned to 16 bytes");
    const int chip = check_chip(call, q, p);
    to.grad = grad.data, to.lse = lse.as<float>(), to.inner = inner.as<float>();
    to.dq = dq.data, to.dk = dk.data, to.dv = dv.data, to.partial = partial.as<float>();
    const auto stream = static_cast<cudaStream_t>(call.stream);
    const int64_t count = rows.count();
    MC_FOR_HALF(q.dtype, T, {
        if (count)
            inner_of<T><<<static_cast<unsigned>(tiles(count, THREADS / 16)), THREADS, 0, stream>>>(
                out.as<T>(), grad.as<T>(), inner.as<float>(), count, p.s, p.heads, p.dim);
        MC_FOR_SIZES(chip, p.dim, S, {
            const int64_t by_keys = tiles(p.longest_k, KeysLayout<S>::ROWS), by_queries = tiles(p.longest_q, QueriesLayout<S>::ROWS);
            if (!partial) to.parts = p.sequences * by_queries;
            if (p.sequences && p.heads && by_keys)
                launch<KeysLayout<S>>(call, of_keys<T, S>, p.sequences * p.heads * by_keys, p, to, by_keys);
            if (p.heads && to.parts && by_queries)
                launch<QueriesLayout<S>>(call, of_queries<T, S>, p.heads * to.parts, p, to, by_queries);
        })
    })
    if (dbias && p.heads && p.distances())
        add_up<<<grid(p.heads * p.distances(), THREADS), THREADS, 0, stream>>>(partial.as<float>(), dbias.as<float>(), p.heads, to.parts, p.distances());
}
