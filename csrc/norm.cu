// LayerNorm and RMSNorm over the last axis, each with an optional residual add and dropout before it: norm.cpp has the formulas.
//
// Rows of up to 8192 columns: a thread has 8 columns of all rows of its blocks, so that weights, bias and the sums for their
// gradients stay in its registers; a row is a group of warps, a block one or several such groups, and as many blocks as fit walk
// over the rows. Rows to come are on their way into shared memory meanwhile (cp.async), where a thread reads only what it has
// copied, so that a row costs no barrier but the one of its sums. Where rows are not aligned, a thread's columns are `threads`
// apart and all of a row's loads are issued before one is used, as on chips without such copies, the next row being on its way
// into the second cache. The blocks write their sums to `partial`, which a second kernel adds up in a fixed order. Longer rows are
// read again for each sum.
//
// Bytes an element must move in bf16: forward 4 (8 with a residual), backward 6 (8).
#include "cuda.h"
#include "philox.h"

namespace {

constexpr int64_t WIDEST = 8192;  // eight columns for each of 1024 threads
constexpr int STAGES = 4;         // rows in shared memory, at most
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr bool COPIES = true;  // cp.async
#else
constexpr bool COPIES = false;
#endif

struct Problem {
    const void *x, *residual;  // backward: the gradient of the norm, and of the total by another way
    const void* total_in;      // backward: what was normalised
    const void *weight, *bias;
    Dtype weight_dtype, apart;  // apart: of `branch`
    const int64_t* seed;
    uint32_t threshold;
    float scale, eps;
    bool centred;
    void *out, *total, *branch;  // backward: total is the gradient of the total
    float *stats, *partial;
    int64_t rows;
    int64_t dim;
    int stages;  // of the ring in shared memory
};

__device__ __forceinline__ float weight1(const void* p, Dtype dtype, int64_t at) {
    MC_FOR_FLOAT(dtype, W, return to_float(static_cast<const W*>(p)[at]))
    return 0.0f;
}

// Bit i: is element e + i kept? Where e is a multiple of 8 they share one counter.
__device__ __forceinline__ uint32_t bits8(uint64_t counter, uint64_t key, uint32_t threshold) {
    const Words words = philox(counter, key);
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) found |= static_cast<uint32_t>(kept(words, i, threshold)) << i;
    return found;
}
__device__ __forceinline__ uint32_t kept8(uint64_t e, uint64_t key, uint32_t threshold) {
    uint32_t found = bits8(e / 8, key, threshold);
    if (e % 8) found = (found | bits8(e / 8 + 1, key, threshold) << 8) >> (e % 8) & 0xFFu;
    return found;
}

// 1 / sqrt(x), rounded almost always correctly: rsqrtf and one step of Newton with the product's rounding error
__device__ __forceinline__ float inverse_root(float x) {
    const float r = rsqrtf(x), high = x * r, low = fmaf(x, r, -high), e = fmaf(-low, r, fmaf(-high, r, 1.0f));
    return fabsf(e) < 1.0f ? fmaf(0.5f * r, e, r) : r;
}

struct Stats {
    float mean, rstd, shift;
    __device__ __forceinline__ float normal(float x) const { return fmaf(x - mean, rstd, shift); }
};

// residual + dropout(x), eight at a time
template <class T, class R>
__device__ __forceinline__ Pack<R> add8(const Pack<T>& x, const Pack<R>& residual, bool drop, uint32_t keep, float scale) {
    Pack<R> total;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float value = to_float(x.at[i]);
        total.at[i] = from_float<R>((!drop ? value : keep >> i & 1 ? value * scale : 0.0f) + to_float(residual.at[i]));
    }
    return total;
}

// Sums over groups of `wide` lanes, a power of two.
template <int N>
__device__ __forceinline__ void lane_sums(float (&x)[N], int wide = 32) {
    for (int lane = wide / 2; lane; lane /= 2)
#pragma unroll
        for (int i = 0; i < N; i++) x[i] += __shfl_xor_sync(0xFFFFFFFFu, x[i], lane);
}
__device__ __forceinline__ int lanes_for(int warps) { return warps == 1 ? 1 : 1 << (32 - __clz(warps - 1)); }

// The threads of a row wait for each other; other rows of the block go on.
__device__ __forceinline__ void row_barrier() {
    asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(threadIdx.y) + 1), "r"(static_cast<int>(blockDim.x)) : "memory");
}

// Statistics of a row that a group of threads holds. A warp's columns are first taken about some number near to them: n, that
// number, what the sum is beyond it, and squares about it. Warps are combined by Chan's rule; one barrier, for `parts` is used in
// turns.
__device__ __forceinline__ Stats row_stats(float n, float about, float left, float squares, float all, bool centred, float eps,
                                           float4 (*parts)[32], int& turn) {
    const int warps = blockDim.x / 32, first = threadIdx.y * warps, lane = threadIdx.x % 32, wide = lanes_for(warps);
    if (centred) {
        float both[2] = {left, squares};
        lane_sums(both);
        left = both[0], squares = both[1];
    } else {
        squares = warp_sum(squares);
    }
    float4 part = make_float4(n, about, left, squares);
    if (warps > 1) {
        if (lane == 0) parts[turn][first + threadIdx.x / 32] = part;
        row_barrier();
        part = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (lane % wide < warps) part = parts[turn][first + lane % wide];
        turn ^= 1;
    }
    float mean = 0.0f, more = 0.0f;
    if (centred) {
        float sum[1] = {fmaf(part.x, part.y, part.z)};
        lane_sums(sum, wide);
        mean = sum[0] / all;
        const float d = part.y - mean;
        float both[2] = {fmaf(part.x, d, part.z), part.w + d * fmaf(part.x, d, 2.0f * part.z)};
        lane_sums(both, wide);
        more = both[0] / all, squares = both[1];
    } else {
        float sum[1] = {part.w};
        lane_sums(sum, wide);
        squares = sum[0];
    }
    const float rstd = inverse_root(squares / all - more * more + eps);
    return {mean, rstd, -more * rstd};
}

// The eight columns of a thread: neighbours where rows are aligned (dim divides by 8), otherwise as far apart as there are threads.
template <bool VECTOR>
struct Mine {
    int first, step, dim;
    __device__ __forceinline__ explicit Mine(int dim)
        : first(VECTOR ? static_cast<int>(threadIdx.x) * 8 : static_cast<int>(threadIdx.x)),
          step(VECTOR ? 1 : static_cast<int>(blockDim.x)), dim(dim) {}
    __device__ __forceinline__ int column(int k) const { return first + k * step; }
    __device__ __forceinline__ bool has(int k) const { return VECTOR ? first < dim : column(k) < dim; }
    template <class T>
    __device__ __forceinline__ Pack<T> load(const T* row) const {
        if (VECTOR && first < dim) return load8<true>(row + first);
        Pack<T> pack;
        const Mine here = apart();
#pragma unroll
        for (int k = 0; k < 8; k++) pack.at[k] = !VECTOR && here.has(k) ? row[here.column(k)] : from_float<T>(0.0f);
        return pack;
    }
    // Into the second cache, a line a thread: a thread has 32 bytes of a row at most.
    template <class T>
    __device__ __forceinline__ void prefetch(const T* row) const {
        const int line = static_cast<int>(threadIdx.x) * static_cast<int>(128 / sizeof(T));
#ifdef __CUDA_ARCH__
        if (line < dim) asm volatile("prefetch.global.L2 [%0];" ::"l"(row + line));
#endif
    }
    template <class T>
    __device__ __forceinline__ void store(T* row, const Pack<T>& pack) const {
        if (VECTOR) {
            if (first < dim) store8<true>(row + first, pack);
        } else {
            const Mine here = apart();
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (here.has(k)) row[here.column(k)] = pack.at[k];
        }
    }
    // The same columns, of which the compiler does not know that they are: it would keep all their numbers in registers.
    __device__ __forceinline__ Mine apart() const {
        Mine here = *this;
#ifdef __CUDA_ARCH__
        if (!VECTOR) asm volatile("" : "+r"(here.step));
#endif
        return here;
    }
    __device__ __forceinline__ void weights(float (&to)[8], const void* p, Dtype dtype) const {
        MC_FOR_FLOAT(dtype, W, const Pack<W> pack = load(static_cast<const W*>(p));
                     for (int k = 0; k < 8; k++) to[k] = to_float(pack.at[k]);)
    }
    // bit k: is column k of the row that begins at element `at` kept?
    __device__ __forceinline__ uint32_t keep(int64_t at, uint64_t key, uint32_t threshold) const {
        if (VECTOR) return bits8((at + first) / 8, key, threshold);
        uint32_t found = 0;
#pragma unroll 1
        for (int k = 0; k < 8; k++) {
            const uint64_t e = at + column(k);
            found |= (bits8(e / 8, key, threshold) >> (e % 8) & 1) << k;
        }
        return found;
    }
};

template <class T>
constexpr int PLANES = sizeof(Pack<T>) / 16;

// Shared memory of one thread: for each row to come, packs in planes of 16 bytes a thread.
struct Ring {
    uint4* own;
    int threads, planes, stages;
    template <class T>
    __device__ __forceinline__ void copy(int stage, int plane, const T* from) const {
#pragma unroll
        for (int i = 0; i < PLANES<T>; i++)
            copy16(at(stage, plane + i), reinterpret_cast<const uint4*>(from) + i);
    }
    template <class T>
    __device__ __forceinline__ void put(int stage, int plane, const Pack<T>& pack) const {
#pragma unroll
        for (int i = 0; i < PLANES<T>; i++) *at(stage, plane + i) = reinterpret_cast<const uint4*>(&pack)[i];
    }
    template <class T>
    __device__ __forceinline__ Pack<T> get(int stage, int plane) const {
        Pack<T> pack;
#pragma unroll
        for (int i = 0; i < PLANES<T>; i++) reinterpret_cast<uint4*>(&pack)[i] = *at(stage, plane + i);
        return pack;
    }
    __device__ __forceinline__ uint4* at(int stage, int plane) const { return own + (stage * planes + plane) * threads; }
    static __device__ __forceinline__ void copy16(uint4* to, const uint4* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
#else
        *to = *from;
#endif
    }
    static __device__ __forceinline__ void commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }
    // until the oldest row has come
    __device__ __forceinline__ void wait() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        switch (stages) {
            case 1: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
            case 2: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
            case 3: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
            default: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
        }
#endif
    }
    // nothing comes for threads beyond the row
    __device__ __forceinline__ void clear() const {
        for (int i = 0; i < stages * planes; i++) own[i * threads] = make_uint4(0, 0, 0, 0);
    }
};

// f(row, stage) for the rows of this group of threads; copy(row, stage) starts what brings a row, or else read(row, next)
// waits for it, while the next row is on its way into a cache.
template <bool ASYNC, class Copy, class Read, class F>
__device__ __forceinline__ void walk(const Ring& ring, int64_t rows, Copy copy, Read read, F f) {
    const int64_t step = int64_t{gridDim.x} * blockDim.y, begin = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const auto bring = [&](int64_t row, int stage) {
        if (row < rows) copy(row, stage);
        Ring::commit();
    };
    int stage = 0;
    if (ASYNC)
        for (int i = 0; i + 1 < ring.stages; i++) bring(begin + i * step, i);
    for (int64_t row = begin; row < rows; row += step) {
        if (ASYNC) {
            bring(row + (ring.stages - 1) * step, stage ? stage - 1 : ring.stages - 1);
            ring.wait();
        } else {
            read(row, row + step < rows ? row + step : row);
        }
        f(row, stage);
        if (ASYNC && ++stage == ring.stages) stage = 0;
    }
}

__device__ __forceinline__ void weights8(float (&to)[8], const void* p, Dtype dtype, int64_t column) {
    MC_FOR_FLOAT(dtype, W, const Pack<W> pack = load8<true>(static_cast<const W*>(p) + column);
                 for (int k = 0; k < 8; k++) to[k] = to_float(pack.at[k]);)
}

// The same of a row that is held: each(f) passes a thread's columns to f, twice. Fewer instructions count for more here than fewer
// reductions: the mean of a warp first, then what is beyond it, and all warps added up by every thread.
template <class F>
__device__ __forceinline__ Stats held_stats(F each, float n, float all, bool centred, float eps, float4 (*parts)[32], int& turn) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    float mean = 0.0f, left = 0.0f, squares = 0.0f;
    if (centred) {
        each([&](float x) { mean += x; });
        mean = n > 0.0f ? warp_sum(mean) / n : 0.0f;
    }
    each([&](float x) {
        const float d = x - mean;
        left += d;
        squares = fmaf(d, d, squares);
    });
    squares = warp_sum(squares);
    left = centred ? warp_sum(left) : 0.0f;
    if (warps > 1) {
        if (threadIdx.x % 32 == 0) parts[turn][warp] = make_float4(n, mean, left, squares);
        __syncthreads();
        float whole = 0.0f;
        for (int i = 0; i < warps; i++) whole = fmaf(parts[turn][i].x, parts[turn][i].y, whole);
        mean = whole / all, left = squares = 0.0f;
        for (int i = 0; i < warps; i++) {
            const float4 part = parts[turn][i];
            const float d = part.y - mean;
            left += fmaf(part.x, d, part.z);
            squares += fmaf(d, fmaf(part.x, d, 2.0f * part.z), part.w);
        }
        turn ^= 1;
    }
    const float more = centred ? left / all : 0.0f;
    const float rstd = inverse_root(squares / all - more * more + eps);
    return {mean, rstd, -more * rstd};
}

// Aligned rows, forward: a group of warps holds a row in its registers, up to PACKS packs of eight columns a thread, so that many
// rows are under way at once. (Bringing rows through shared memory, as the backward does, was half as fast here.)
template <class T, class R, class O, int PACKS>
__global__ void __launch_bounds__(PACKS == 1 ? 128 : 1024 / PACKS, PACKS == 1 ? 8 : PACKS == 2 ? 2 : 3) norm_held(const Problem p) {
    __shared__ float4 parts[2][32];
    const T* __restrict__ x = static_cast<const T*>(p.x);
    const R* __restrict__ source = static_cast<const R*>(p.residual ? p.residual : p.x);  // without a residual, T is R
    R* __restrict__ total = static_cast<R*>(p.total);
    O* __restrict__ out = static_cast<O*>(p.out);
    const int dim = static_cast<int>(p.dim), across = static_cast<int>(blockDim.x), me = static_cast<int>(threadIdx.x);
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    const auto packs = [&](auto f) {
#pragma unroll
        for (int i = 0; i < PACKS; i++)
            if ((i * across + me) * 8 < dim) f(i, (i * across + me) * 8);
    };
    float n = 0.0f;  // columns of this warp
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        const int begin = (i * across + me / 32 * 32) * 8;
        n += static_cast<float>(min(max(dim - begin, 0), 256));
    }
    int turn = 0;
    for (int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; row < p.rows; row += int64_t{gridDim.x} * blockDim.y) {
        const int64_t at = row * dim;
        Pack<R> h[PACKS];
        packs([&](int i, int column) { h[i] = load8<true>(source + at + column); });
        if (p.residual) {
            Pack<T> more[PACKS];
            packs([&](int i, int column) { more[i] = load8<true>(x + at + column); });
            packs([&](int i, int column) {
                h[i] = add8(more[i], h[i], p.seed, p.seed ? bits8((at + column) / 8, key, p.threshold) : 0, p.scale);
                store8<true>(total + at + column, h[i]);
            });
        }
        const Stats s = held_stats(
            [&](auto f) {
                packs([&](int i, int) {
#pragma unroll
                    for (int k = 0; k < 8; k++) f(to_float(h[i].at[k]));
                });
            },
            n, static_cast<float>(dim), p.centred, p.eps, parts, turn);
        if (me == 0) p.stats[row] = s.mean, p.stats[p.rows + row] = s.rstd, p.stats[2 * p.rows + row] = s.shift;
        packs([&](int i, int column) {
            float w[8], b[8] = {};
            weights8(w, p.weight, p.weight_dtype, column);
            if (p.bias) weights8(b, p.bias, p.weight_dtype, column);
            Pack<O> y;
#pragma unroll
            for (int k = 0; k < 8; k++) y.at[k] = from_float<O>(fmaf(s.normal(to_float(h[i].at[k])), w[k], b[k]));
            store8<true>(out + at + column, y);
        });
    }
}

template <class T, class R, class O, bool VECTOR>
__global__ void __launch_bounds__(1024) norm_rows(const Problem p) {
    constexpr bool ASYNC = VECTOR && COPIES;
    constexpr int AFTER = PLANES<R>;
    extern __shared__ uint4 memory[];
    __shared__ float4 parts[2][32];
    const T* __restrict__ x = static_cast<const T*>(p.x);
    const R* __restrict__ source = static_cast<const R*>(p.residual ? p.residual : p.x);  // without a residual, T is R
    R* __restrict__ total = static_cast<R*>(p.total);
    O* __restrict__ out = static_cast<O*>(p.out);
    const bool adds = p.residual;
    const int dim = static_cast<int>(p.dim);
    const Mine<VECTOR> mine(dim);
    const Ring ring{memory + threadIdx.y * blockDim.x + threadIdx.x, static_cast<int>(blockDim.x * blockDim.y),
                    AFTER + (adds ? PLANES<T> : 0), ASYNC ? p.stages : 1};
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    float w[8], b[8] = {}, n = 0.0f;
    mine.weights(w, p.weight, p.weight_dtype);
    if (p.bias) mine.weights(b, p.bias, p.weight_dtype);
#pragma unroll
    for (int k = 0; k < 8; k++) n += mine.has(k) ? 1.0f : 0.0f;
    const float shared = __shfl_sync(0xFFFFFFFFu, n, 0);  // columns of the first lane
    n = warp_sum(n);
    int turn = 0;
    if (ASYNC && mine.first >= dim) ring.clear();
    walk<ASYNC>(
        ring, p.rows,
        [&](int64_t row, int stage) {
            if (mine.first >= dim) return;
            ring.copy(stage, 0, source + row * dim + mine.first);
            if (adds) ring.copy(stage, AFTER, x + row * dim + mine.first);
        },
        [&](int64_t row, int64_t next) {
            const Pack<R> first = mine.load(source + row * dim);
            mine.prefetch(source + next * dim);
            if (adds) mine.prefetch(x + next * dim);
            if (adds) ring.put(0, AFTER, mine.load(x + row * dim));
            ring.put(0, 0, first);
        },
        [&](int64_t row, int stage) {
            const int64_t at = row * dim;
            Pack<R> h = ring.get<R>(stage, 0);
            if (adds) {
                h = add8(ring.get<T>(stage, AFTER), h, p.seed, p.seed ? mine.keep(at, key, p.threshold) : 0, p.scale);
                mine.store(total + at, h);
            }
            float about = 0.0f, left = 0.0f, squares = 0.0f;
            if (p.centred) {
#pragma unroll
                for (int k = 0; k < 8; k++) about += mine.has(k) ? to_float(h.at[k]) : 0.0f;
                about = __shfl_sync(0xFFFFFFFFu, about, 0) / shared;
            }
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const float d = mine.has(k) ? to_float(h.at[k]) - about : 0.0f;
                left += d;
                squares = fmaf(d, d, squares);
            }
            const Stats s = row_stats(n, about, left, squares, static_cast<float>(dim), p.centred, p.eps, parts, turn);
            if (threadIdx.x == 0) p.stats[row] = s.mean, p.stats[p.rows + row] = s.rstd, p.stats[2 * p.rows + row] = s.shift;
            Pack<O> y;
#pragma unroll
            for (int k = 0; k < 8; k++) y.at[k] = from_float<O>(fmaf(s.normal(to_float(h.at[k])), w[k], b[k]));
            mine.store(out + at, y);
        });
}

// f(column) for all columns of a row, neighbours by neighbouring threads: rows of any length and alignment, read from the first
// cache as often as there are sums
template <class F>
__device__ __forceinline__ void columns(int64_t dim, F f) {
    for (int64_t c = threadIdx.x; c < dim; c += blockDim.x) f(c);
}
// f(column, how many) for groups of eight, which share one counter or two of the random bits
template <class F>
__device__ __forceinline__ void eights(int64_t dim, F f) {
    const int64_t step = int64_t{blockDim.x} * 8;
    for (int64_t c = int64_t{threadIdx.x} * 8; c < dim; c += step) f(c, static_cast<int>(min(dim - c, int64_t{8})));
}

template <class T, class R, class O>
__global__ void __launch_bounds__(1024) norm_any_rows(const Problem p) {
    __shared__ float4 parts[2][32];
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    int turn = 0;
    float n = 0.0f;
    columns(p.dim, [&](int64_t) { n += 1.0f; });
    n = warp_sum(n);
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const int64_t at = row * p.dim;
        const R* h = p.residual ? static_cast<R*>(p.total) + at : static_cast<const R*>(p.x) + at;
        if (p.residual) {
            eights(p.dim, [&](int64_t c, int count) {
                const uint32_t keep = p.seed ? kept8(at + c, key, p.threshold) : 0;
                const Pack<R> sum = add8(load8<false>(static_cast<const T*>(p.x) + at + c, count),
                                         load8<false>(static_cast<const R*>(p.residual) + at + c, count), p.seed, keep, p.scale);
                store8<false>(static_cast<R*>(p.total) + at + c, sum, count);
            });
            __syncthreads();
        }
        const auto each = [&](auto f) { columns(p.dim, [&](int64_t c) { f(to_float(h[c])); }); };
        float about = 0.0f, left = 0.0f, squares = 0.0f;
        if (p.centred) each([&](float v) { about += v; });
        about = warp_sum(about) / n;
        each([&](float v) {
            left += v - about;
            squares = fmaf(v - about, v - about, squares);
        });
        const Stats s = row_stats(n, about, left, squares, static_cast<float>(p.dim), p.centred, p.eps, parts, turn);
        if (threadIdx.x == 0) p.stats[row] = s.mean, p.stats[p.rows + row] = s.rstd, p.stats[2 * p.rows + row] = s.shift;
        columns(p.dim, [&](int64_t c) {
            const float w = weight1(p.weight, p.weight_dtype, c), b = p.bias ? weight1(p.bias, p.weight_dtype, c) : 0.0f;
            static_cast<O*>(p.out)[at + c] = from_float<O>(fmaf(s.normal(to_float(h[c])), w, b));
        });
    }
}

// As many threads as there are packs, in whole warps.
int threads_for(int64_t dim, int columns, int most) {
    const int64_t wanted = (dim + columns - 1) / columns * 32;
    return static_cast<int>(wanted < most ? wanted : most);
}

// A group of threads for a row and several groups for a block; rows in shared memory, at most STAGES, 0 where not one fits.
struct Plan {
    dim3 block;
    int groups, resident, stages;
    size_t bytes;
};

int attribute(cudaDeviceAttr which) {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, which, device);
    return value;
}

// `planes` of 16 bytes a thread hold a row; `least`: bytes a thread for other uses of the same memory
Plan plan(int64_t dim, int planes, int least) {
    Plan found{};
    const int threads = threads_for(dim, 256, 1024), groups = threads <= 256 ? 512 / threads : 1;  // _norm.py: lines
    const int all = threads * groups, resident = 1024 / all;
    const int fit = min(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                        attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / resident - 1024) - 1024;
    found.block = dim3(threads, groups), found.groups = groups, found.resident = resident;
    const int stages = fit / (16 * planes * all);
    found.stages = stages < STAGES ? stages : STAGES;
    const int bytes = 16 * planes * found.stages;
    found.bytes = static_cast<size_t>(bytes < least ? least : bytes) * all;
    return found;
}

template <class K>
void launch(K kernel, const Plan& plan, int blocks, const Problem& p, cudaStream_t stream) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(plan.bytes));
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
    Problem with = p;
    with.stages = plan.stages;
    kernel<<<blocks, plan.block, plan.bytes, stream>>>(with);
}

template <class T, class R, class O>
void forward(const Problem& p, bool vector, cudaStream_t stream) {
    const Plan found = plan(p.dim, PLANES<R> + (p.residual ? PLANES<T> : 0), 0);
    if (p.dim > WIDEST || !found.stages) {
        const int threads = threads_for(p.dim, 128, 1024);
        norm_any_rows<T, R, O><<<grid(p.rows, 1, 4096 / threads), threads, 0, stream>>>(p);
        return;
    }
    if (!vector) return launch(norm_rows<T, R, O, false>, found, grid(p.rows, found.groups, found.resident), p, stream);
    if (p.dim <= 256) {
        norm_held<T, R, O, 1><<<grid(p.rows, 4, 64), dim3(32, 4), 0, stream>>>(p);
        return;
    }
    constexpr int PACKS = sizeof(R) == 4 ? 2 : 4;  // 64 bytes of the row for a thread
    const int threads = threads_for(p.dim, 256 * PACKS, 1024 / PACKS), rows = threads == 32 ? 4 : 1;
    norm_held<T, R, O, PACKS><<<grid(p.rows, rows, 64), dim3(threads, rows), 0, stream>>>(p);
}

// ---- backward. O: the norm's gradient; R: the total and its gradient

// f(a number of the dtype that the gradient of what was dropped and added has): the total's, or any around a total in fp32
template <class R, class F>
__device__ __forceinline__ void for_branch(Dtype dtype, F f) {
    if constexpr (sizeof(R) == 2) f(from_float<R>(0.0f));
    else MC_FOR_FLOAT(dtype, T, f(from_float<T>(0.0f)))
}

// Sums of two numbers over the threads of a row; one barrier where it has several warps.
__device__ __forceinline__ float2 row_sums(float a, float b, float2 (*parts)[32], int& turn) {
    const int warps = blockDim.x / 32, first = threadIdx.y * warps, lane = threadIdx.x % 32, wide = lanes_for(warps);
    float sums[2] = {a, b};
    lane_sums(sums);
    if (warps > 1) {
        if (lane == 0) parts[turn][first + threadIdx.x / 32] = make_float2(sums[0], sums[1]);
        row_barrier();
        float2 part = make_float2(0.0f, 0.0f);
        if (lane % wide < warps) part = parts[turn][first + lane % wide];
        turn ^= 1;
        sums[0] = part.x, sums[1] = part.y;
        lane_sums(sums, wide);
    }
    return make_float2(sums[0], sums[1]);
}

// PLAIN: no residual, no branch
template <class O, class R, bool VECTOR, bool PLAIN>
__global__ void __launch_bounds__(1024) norm_rows_backward(const Problem p) {
    constexpr bool ASYNC = VECTOR && COPIES;
    constexpr int TOTAL = PLANES<O>, MORE = TOTAL + PLANES<R>;
    extern __shared__ uint4 memory[];
    __shared__ float2 parts[2][32];
    const O* __restrict__ grad = static_cast<const O*>(p.x);
    const R* __restrict__ total = static_cast<const R*>(p.total_in);
    const R* __restrict__ residual = PLAIN ? nullptr : static_cast<const R*>(p.residual);
    const float* __restrict__ stats = p.stats;
    R* __restrict__ stream = static_cast<R*>(p.total);
    const int dim = static_cast<int>(p.dim);
    const Mine<VECTOR> mine(dim);
    const Ring ring{memory + threadIdx.y * blockDim.x + threadIdx.x, static_cast<int>(blockDim.x * blockDim.y),
                    MORE + (residual ? PLANES<R> : 0), ASYNC ? p.stages : 1};
    const uint64_t key = !PLAIN && p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    const float share = 1.0f / static_cast<float>(dim), scale = p.seed ? p.scale : 1.0f;
    int turn = 0;
    float w[8], dw[8] = {}, db[8] = {};
    mine.weights(w, p.weight, p.weight_dtype);
    if (ASYNC && mine.first >= dim) ring.clear();
    Stats next{};
    const auto read_stats = [&](int64_t row) { next = {stats[row], stats[p.rows + row], stats[2 * p.rows + row]}; };
    const int64_t step = int64_t{gridDim.x} * blockDim.y, begin = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (begin < p.rows) read_stats(begin);
    walk<ASYNC>(
        ring, p.rows,
        [&](int64_t row, int stage) {
            if (mine.first >= dim) return;
            ring.copy(stage, 0, grad + row * dim + mine.first);
            ring.copy(stage, TOTAL, total + row * dim + mine.first);
            if (residual) ring.copy(stage, MORE, residual + row * dim + mine.first);
        },
        [&](int64_t row, int64_t next) {
            const Pack<O> first = mine.load(grad + row * dim);
            const Pack<R> second = mine.load(total + row * dim);
            mine.prefetch(grad + next * dim);
            mine.prefetch(total + next * dim);
            if (residual) mine.prefetch(residual + next * dim);
            if (residual) ring.put(0, MORE, mine.load(residual + row * dim));
            ring.put(0, 0, first);
            ring.put(0, TOTAL, second);
        },
        [&](int64_t row, int stage) {
            const Stats s = next;
            if (row + step < p.rows) read_stats(row + step);
            const int64_t at = row * dim;
            Pack<O> g = ring.get<O>(stage, 0);
            Pack<R> v = ring.get<R>(stage, TOTAL);
            float level = 0.0f, skewed = 0.0f;
#pragma unroll
            for (int k = 0; k < 8; k++) {  // beyond the row all is zero
                const float d = to_float(g.at[k]), h = s.normal(to_float(v.at[k])), weighted = d * w[k];
                dw[k] = fmaf(d, h, dw[k]);
                db[k] += d;
                level += weighted;
                skewed = fmaf(weighted, h, skewed);
            }
            const float2 found = row_sums(level, skewed, parts, turn);
            level = p.centred ? found.x * share : 0.0f, skewed = found.y * share;
            g = ring.get<O>(stage, 0);  // again, rather than in registers meanwhile
            v = ring.get<R>(stage, TOTAL);
            Pack<R> d, more;
            if (residual) more = ring.get<R>(stage, MORE);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const float weighted = to_float(g.at[k]) * w[k], h = s.normal(to_float(v.at[k]));
                const float own = (weighted - level - h * skewed) * s.rstd;
                d.at[k] = from_float<R>(residual ? own + to_float(more.at[k]) : own);
            }
            mine.store(stream + at, d);
            if (!PLAIN && p.branch) {
                const uint32_t keep = p.seed ? mine.keep(at, key, p.threshold) : 0xFFu;
                for_branch<R>(p.apart, [&](auto like) {
                    using T = decltype(like);
                    Pack<T> b;
#pragma unroll
                    for (int k = 0; k < 8; k++) b.at[k] = from_float<T>(keep >> k & 1 ? to_float(d.at[k]) * scale : 0.0f);
                    mine.store(static_cast<T*>(p.branch) + at, b);
                });
            }
        });
    // the block's groups together, then one line of `partial`
    if (blockDim.y > 1) {
        float* sums = reinterpret_cast<float*>(memory);
        const auto at = [&](int y, int j) -> float& { return sums[((y * 16) + j) * blockDim.x + threadIdx.x]; };
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; k++) at(threadIdx.y, k) = dw[k], at(threadIdx.y, 8 + k) = db[k];
        __syncthreads();
        if (threadIdx.y) return;
        for (int y = 1; y < static_cast<int>(blockDim.y); y++)
#pragma unroll
            for (int k = 0; k < 8; k++) dw[k] += at(y, k), db[k] += at(y, 8 + k);
    }
    float* line = p.partial + int64_t{blockIdx.x} * (p.centred ? 2 : 1) * dim;
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (mine.has(k)) {
            line[mine.column(k)] = dw[k];
            if (p.centred) line[dim + mine.column(k)] = db[k];
        }
}

// Rows of any length and alignment: a block each; the sums for weight and bias are another kernel's.
template <class O, class R>
__global__ void __launch_bounds__(1024) norm_any_rows_backward(const Problem p) {
    __shared__ float2 parts[2][32];
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    int turn = 0;
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const int64_t at = row * p.dim;
        const Stats s = {p.stats[row], p.stats[p.rows + row], p.stats[2 * p.rows + row]};
        const auto each = [&](auto f) {
            columns(p.dim, [&](int64_t c) {
                f(at + c, to_float(static_cast<const O*>(p.x)[at + c]) * weight1(p.weight, p.weight_dtype, c),
                  s.normal(to_float(static_cast<const R*>(p.total_in)[at + c])));
            });
        };
        float level = 0.0f, skewed = 0.0f;
        each([&](int64_t, float g, float h) {
            level += g;
            skewed = fmaf(g, h, skewed);
        });
        const float2 found = row_sums(level, skewed, parts, turn);
        level = p.centred ? found.x / static_cast<float>(p.dim) : 0.0f, skewed = found.y / static_cast<float>(p.dim);
        R* stream = static_cast<R*>(p.total);
        each([&](int64_t e, float g, float h) {
            const float d = (g - level - h * skewed) * s.rstd;
            stream[e] = from_float<R>(p.residual ? d + to_float(static_cast<const R*>(p.residual)[e]) : d);
        });
        if (!p.branch) continue;
        __syncthreads();
        eights(p.dim, [&](int64_t c, int count) {
            const uint32_t keep = p.seed ? kept8(at + c, key, p.threshold) : 0xFFu;
            for_branch<R>(p.apart, [&](auto like) {
                using T = decltype(like);
                for (int j = 0; j < count; j++) {
                    const float d = to_float(stream[at + c + j]) * (p.seed ? p.scale : 1.0f);
                    static_cast<T*>(p.branch)[at + c + j] = from_float<T>(keep >> j & 1 ? d : 0.0f);
                }
            });
        });
    }
}

// partial[y]: sums over the rows y, y + gridDim.y ..., for 32 columns a block
template <class O, class R>
__global__ void __launch_bounds__(256) norm_columns(const Problem p) {
    __shared__ float weights[8][33], biases[8][33];
    const int64_t c = int64_t{blockIdx.x} * 32 + threadIdx.x;
    float dw = 0.0f, db = 0.0f;
    const int64_t step = int64_t{gridDim.y} * blockDim.y;
    if (c < p.dim)
        for (int64_t row = int64_t{blockIdx.y} + int64_t{gridDim.y} * threadIdx.y; row < p.rows; row += step) {
            const Stats s = {p.stats[row], p.stats[p.rows + row], p.stats[2 * p.rows + row]};
            const float d = to_float(static_cast<const O*>(p.x)[row * p.dim + c]);
            dw = fmaf(d, s.normal(to_float(static_cast<const R*>(p.total_in)[row * p.dim + c])), dw);
            db += d;
        }
    weights[threadIdx.y][threadIdx.x] = dw, biases[threadIdx.y][threadIdx.x] = db;
    __syncthreads();
    if (threadIdx.y || c >= p.dim) return;
    for (int y = 1; y < 8; y++) dw += weights[y][threadIdx.x], db += biases[y][threadIdx.x];
    float* line = p.partial + int64_t{blockIdx.y} * (p.centred ? 2 : 1) * p.dim;
    line[c] = dw;
    if (p.centred) line[p.dim + c] = db;
}

// The lines of `partial`, added in their order by 16 threads a column and those in theirs.
template <class W>
__global__ void __launch_bounds__(512) norm_add_partial(const float* partial, int64_t lines, int64_t dim, int64_t width, W* dweight,
                                                       W* dbias) {
    __shared__ float sums[16][33];
    const int64_t c = int64_t{blockIdx.x} * 32 + threadIdx.x;
    float sum = 0.0f;
    if (c < width)
        for (int64_t i = threadIdx.y; i < lines; i += 16) sum += partial[i * width + c];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || c >= width) return;
    for (int y = 1; y < 16; y++) sum += sums[y][threadIdx.x];
    (c < dim ? dweight[c] : dbias[c - dim]) = from_float<W>(sum);
}

template <class R, class O>
void backward(const Problem& p, int64_t lines, bool vector, cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>(lines);
    const Plan found = plan(p.dim, PLANES<O> + (p.residual ? 2 : 1) * PLANES<R>, 64);
    if (p.dim > WIDEST || !found.stages) {
        const int threads = threads_for(p.dim, 128, 1024);
        norm_any_rows_backward<O, R><<<grid(p.rows, 1, 4096 / threads), threads, 0, stream>>>(p);
        norm_columns<O, R><<<dim3(static_cast<unsigned>((p.dim + 31) / 32), blocks), dim3(32, 8), 0, stream>>>(p);
    } else {
        MC_FOR_BOOL(vector, VECTOR, MC_FOR_BOOL(!p.residual && !p.branch, PLAIN,
            launch(norm_rows_backward<O, R, VECTOR, PLAIN>, found, static_cast<int>(lines), p, stream)))
    }
}

// What is added and what comes out may be in half precision around a total in fp32; otherwise all three are one dtype.
bool known(Dtype x, Dtype total, Dtype out) {
    if (total != F32) return x == total && out == total;
    return x == F32 || out == F32 || x == out;
}

}  // namespace

#define MC_NORM_TYPE(A, B, C, ...)      \
    {                                   \
        using T = A;                    \
        using R = B;                    \
        using O = C;                    \
        __VA_ARGS__;                    \
    }
#define MC_FOR_NORM(x, total, out, ...)                                              \
    if (total == BF16) MC_NORM_TYPE(bf16, bf16, bf16, __VA_ARGS__)                   \
    else if (total == F16) MC_NORM_TYPE(fp16, fp16, fp16, __VA_ARGS__)               \
    else if (x == F32 && out == F32) MC_NORM_TYPE(float, float, float, __VA_ARGS__)  \
    else if (x == F32 && out == BF16) MC_NORM_TYPE(float, float, bf16, __VA_ARGS__)  \
    else if (x == F32) MC_NORM_TYPE(float, float, fp16, __VA_ARGS__)                 \
    else if (x == BF16 && out == F32) MC_NORM_TYPE(bf16, float, float, __VA_ARGS__)  \
    else if (x == BF16) MC_NORM_TYPE(bf16, float, bf16, __VA_ARGS__)                 \
    else if (out == F32) MC_NORM_TYPE(fp16, float, float, __VA_ARGS__)               \
    else MC_NORM_TYPE(fp16, float, fp16, __VA_ARGS__)

static void set_rate(Problem& p, const Array& seed, double rate) {
    p.seed = seed.as<int64_t>();
    p.threshold = static_cast<uint32_t>(rate * 65536 + 0.5);
    p.scale = p.threshold >= 65536 ? 0.0f : 65536.0f / (65536 - p.threshold);
}

MC_KERNEL(norm) {
    const Array x = call.in("x", FLOATS);
    const Shape rows{x.shape.rows()}, columns{x.shape.last()};
    const Array residual = call.maybe("residual", FLOATS, x.shape);
    const Array weight = call.in("weight", FLOATS, columns);
    const Array bias = call.maybe("bias", weight.dtype, columns);
    const double eps = call.real("eps");
    const bool centred = call.flag("centred");
    const Array seed = call.maybe("seed", I64, Shape{1});
    const double rate = call.real("p");
    const Array out = call.out("out", FLOATS, x.shape);
    const Array total = call.maybe_out("total", residual ? residual.dtype : x.dtype, x.shape);
    const Array stats = call.out("stats", F32, Shape{3, rows.at[0]});
    const bool adds = static_cast<bool>(residual);
    if (adds != static_cast<bool>(total)) call.refuse("a total is written where there is a residual, and only there");
    const Dtype source = residual ? residual.dtype : x.dtype;
    if (!known(x.dtype, source, out.dtype)) call.refuse("no kernel for this mixture of dtypes");
    call.ready();
    Problem p{};
    p.x = x.data, p.residual = residual.data, p.weight = weight.data, p.bias = bias.data, p.weight_dtype = weight.dtype;
    p.eps = static_cast<float>(eps), p.centred = centred, p.out = out.data, p.total = total.data, p.stats = stats.as<float>();
    p.rows = rows.at[0], p.dim = columns.at[0];
    set_rate(p, seed, rate);
    if (!p.rows || !p.dim) return;
    const bool vector = p.dim % 8 == 0 && x.aligned() && residual.aligned() && weight.aligned() && bias.aligned() &&
                        out.aligned() && total.aligned();
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_NORM(x.dtype, source, out.dtype, forward<T, R, O>(p, vector, stream))
}

MC_KERNEL(norm_backward) {
    const Array grad = call.in("grad", FLOATS);
    const Shape columns{grad.shape.last()};
    const Array total = call.in("total", FLOATS, grad.shape);
    const Array more = call.maybe("more", total.dtype, grad.shape);
    const Array weight = call.in("weight", FLOATS, columns);
    const Array stats = call.in("stats", F32, Shape{3, grad.shape.rows()});
    const Array seed = call.maybe("seed", I64, Shape{1});
    const double rate = call.real("p");
    const Array stream = call.out("stream", total.dtype, grad.shape);
    const Array branch = call.maybe_out("branch", FLOATS, grad.shape);
    const Array dweight = call.out("dweight", weight.dtype, columns);
    const Array dbias = call.maybe_out("dbias", weight.dtype, columns);
    const Array partial = call.inout("partial", F32);
    const int64_t dim = columns.at[0], lines = partial.shape.rank ? partial.shape.at[0] : 0;
    if (!(partial.shape == Shape{lines, dbias ? 2 : 1, dim}) || lines < 1 || lines > 65535)
        call.refuse("partial: 1 to 65535 lines of sums are wanted");
    const Dtype apart = branch ? branch.dtype : total.dtype;
    if (!known(apart, total.dtype, grad.dtype)) call.refuse("no kernel for this mixture of dtypes");
    call.ready();
    if (!dim) return;
    Problem p{};
    p.x = grad.data, p.total_in = total.data, p.residual = more.data, p.weight = weight.data, p.weight_dtype = weight.dtype;
    p.centred = static_cast<bool>(dbias), p.stats = stats.as<float>(), p.total = stream.data, p.branch = branch.data;
    p.apart = apart, p.partial = partial.as<float>(), p.rows = grad.shape.rows(), p.dim = dim;
    set_rate(p, seed, rate);
    const bool vector = dim % 8 == 0 && grad.aligned() && total.aligned() && more.aligned() && weight.aligned() &&
                        stream.aligned() && branch.aligned();
    const auto on = static_cast<cudaStream_t>(call.stream);
    const int64_t width = partial.shape.at[1] * dim;
    if (p.rows) MC_FOR_NORM(apart, total.dtype, grad.dtype, backward<R, O>(p, lines, vector, on))
    MC_FOR_FLOAT(weight.dtype, W, norm_add_partial<W><<<static_cast<unsigned>((width + 31) / 32), dim3(32, 16), 0, on>>>(
        p.partial, p.rows ? lines : 0, dim, width, dweight.as<W>(), dbias.as<W>()))
}
