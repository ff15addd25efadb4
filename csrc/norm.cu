// LayerNorm and RMSNorm over the last axis, each with an optional residual add and dropout before it: norm.cpp has the formulas.
//
// Forward: a row stays in the registers of one warp (up to 512 columns in fp32, 1024 in half precision) or one block (up to 8192),
// 8 columns in a pack; longer and misaligned rows are read again for each sum. Warps find mean and squares for their own columns
// and are combined by Chan's rule, so that a row costs one barrier. Backward: a fixed grid walks over the rows, the next row being
// loaded while one is computed; each block keeps its sums for weight and bias in registers and writes them to `partial`, which a
// second kernel adds up in a fixed order.
//
// Bytes an element must move in bf16: forward 4 (8 with a residual), backward 6 (8).
#include "cuda.h"
#include "philox.h"

namespace {

constexpr int64_t WIDEST = 8192;  // columns that fit into the registers of a block

struct Problem {
    const void *x, *residual;  // backward: the gradient of the norm, and of the total by another way
    const void* total_in;      // backward: what was normalised
    const void *weight, *bias;
    Dtype weight_dtype;
    const int64_t* seed;
    uint32_t threshold;
    float scale, eps;
    bool centred;
    void *out, *total, *branch;  // backward: total is the gradient of the total
    float *stats, *partial;
    int64_t rows;
    int64_t dim;
};

// Weights as floats; their dtype is the same for all threads.
template <class W>
__device__ __forceinline__ void weights8(float* to, const W* p) {
    const Pack<W> pack = load8<true>(p);
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] = to_float(pack.at[i]);
}
__device__ __forceinline__ void weights8(float* to, const void* p, Dtype dtype, int64_t at) {
    MC_FOR_FLOAT(dtype, W, weights8(to, static_cast<const W*>(p) + at))
}
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

// Mean, then what is left of it, and squares about it, of one row that a block's threads hold between them. `n`: columns of this
// warp; all: of the row. One barrier, for `parts` is used in turns.
template <class F>
__device__ __forceinline__ Stats row_stats(F each, float n, float all, bool centred, float eps, float4 (*parts)[32], int& turn) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    float mean = 0.0f, left = 0.0f, squares = 0.0f;
    if (centred) {
        each([&](float x) { mean += x; });
        mean = warp_sum(mean) / n;
    }
    each([&](float x) {
        const float h = x - mean;
        left += h;
        squares = fmaf(h, h, squares);
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

// 8 columns of a thread in each pack; the last ones may lie beyond the row. The number of columns divides by 8.
template <int PACKS, class F>
__device__ __forceinline__ void packs(int dim, F f) {
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        const int column = (i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * 8;
        if (column < dim) f(i, column);
    }
}

template <class T, class R, class O, int PACKS>
__global__ void __launch_bounds__(PACKS == 1 ? 128 : 1024 / PACKS, PACKS == 1 ? 8 : PACKS == 2 ? 2 : 3) norm_rows(const Problem p) {
    __shared__ float4 parts[2][32];
    const T* __restrict__ x = static_cast<const T*>(p.x);
    const R* __restrict__ residual = static_cast<const R*>(p.residual);
    R* __restrict__ total = static_cast<R*>(p.total);
    O* __restrict__ out = static_cast<O*>(p.out);
    const int dim = static_cast<int>(p.dim);
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    float n = 0.0f;  // columns of this warp
    int turn = 0;
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        const int begin = (i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x) / 32 * 32) * 8;
        n += static_cast<float>(min(max(dim - begin, 0), 256));
    }
    for (int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; row < p.rows; row += int64_t{gridDim.x} * blockDim.y) {
        const int64_t at = row * dim;
        Pack<R> h[PACKS];
        if (residual) {
            Pack<T> more[PACKS];
            packs<PACKS>(dim, [&](int i, int column) {
                more[i] = load8<true>(x + at + column);
                h[i] = load8<true>(residual + at + column);
            });
            packs<PACKS>(dim, [&](int i, int column) {
                h[i] = add8(more[i], h[i], p.seed, p.seed ? kept8(at + column, key, p.threshold) : 0, p.scale);
                store8<true>(total + at + column, h[i]);
            });
        } else {  // x is what is normalised: T is R
            packs<PACKS>(dim, [&](int i, int column) { h[i] = load8<true>(reinterpret_cast<const R*>(x) + at + column); });
        }
        const Stats s = row_stats(
            [&](auto f) {
                packs<PACKS>(dim, [&](int i, int) {
#pragma unroll
                    for (int j = 0; j < 8; j++) f(to_float(h[i].at[j]));
                });
            },
            n, static_cast<float>(dim), p.centred, p.eps, parts, turn);
        if (threadIdx.x == 0) p.stats[row] = s.mean, p.stats[p.rows + row] = s.rstd, p.stats[2 * p.rows + row] = s.shift;
        packs<PACKS>(dim, [&](int i, int column) {
            float w[8], b[8] = {};
            weights8(w, p.weight, p.weight_dtype, column);
            if (p.bias) weights8(b, p.bias, p.weight_dtype, column);
            Pack<O> y;
#pragma unroll
            for (int j = 0; j < 8; j++) y.at[j] = from_float<O>(fmaf(s.normal(to_float(h[i].at[j])), w[j], b[j]));
            store8<true>(out + at + column, y);
        });
    }
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
        const Stats s = row_stats(each, n, static_cast<float>(p.dim), p.centred, p.eps, parts, turn);
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

template <class T, class R, class O>
void forward(const Problem& p, bool vector, cudaStream_t stream) {
    if (!vector || p.dim > WIDEST) {
        const int threads = threads_for(p.dim, 128, 1024);
        norm_any_rows<T, R, O><<<grid(p.rows, 1, 4096 / threads), threads, 0, stream>>>(p);
    } else if (p.dim <= 256) {
        norm_rows<T, R, O, 1><<<grid(p.rows, 4, 64), dim3(32, 4), 0, stream>>>(p);
    } else {
        constexpr int PACKS = sizeof(R) == 4 ? 2 : 4;  // 64 bytes of the row for a thread
        const int threads = threads_for(p.dim, 256 * PACKS, 1024 / PACKS), rows = threads == 32 ? 4 : 1;
        norm_rows<T, R, O, PACKS><<<grid(p.rows, rows, 64), dim3(threads, rows), 0, stream>>>(p);
    }
}

// ---- backward. O: the norm's gradient; R: the total and its gradient; T: the gradient of what was dropped and added

// Sums of two numbers over the threads of a row; one barrier for the block where a row has several warps.
__device__ __forceinline__ float2 row_sums(float a, float b, bool centred, float2 (*parts)[32], int& turn) {
    const int warps = blockDim.x / 32, first = threadIdx.y * warps;
    if (centred) a = warp_sum(a);
    b = warp_sum(b);
    if (warps == 1) return make_float2(a, b);
    if (threadIdx.x % 32 == 0) parts[turn][first + threadIdx.x / 32] = make_float2(a, b);
    __syncthreads();
    a = b = 0.0f;
    for (int i = first; i < first + warps; i++) a += parts[turn][i].x, b += parts[turn][i].y;
    turn ^= 1;
    return make_float2(a, b);
}

template <class O, class R, int PACKS>
struct Row {  // what a thread reads of one before its sums are known
    Pack<O> grad[PACKS];
    Pack<R> total[PACKS];
    Stats stats;
};

// Two packs: 512 threads have registers for the sums of 8192 columns. _norm.py knows how many blocks are resident.
template <class O, class R, class T, int PACKS>
__global__ void __launch_bounds__(256 * PACKS, PACKS == 2 ? 1 : sizeof(O) + sizeof(R) == 4 ? 3 : 2)
norm_rows_backward(const Problem p) {
    constexpr bool AHEAD = (sizeof(O) + sizeof(R)) * PACKS <= 8;  // registers for a second row
    __shared__ float2 parts[2][32];
    __shared__ float sums[PACKS == 1 ? 256 * 16 : 1];
    const O* __restrict__ grad = static_cast<const O*>(p.x);
    const R* __restrict__ total = static_cast<const R*>(p.total_in);
    const R* __restrict__ residual = static_cast<const R*>(p.residual);
    R* __restrict__ stream = static_cast<R*>(p.total);
    T* __restrict__ branch = static_cast<T*>(p.branch);
    const int dim = static_cast<int>(p.dim);
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    const float all = static_cast<float>(dim);
    int turn = 0;
    float w[8] = {}, dw[PACKS][8] = {}, db[PACKS][8] = {};
    if (PACKS == 1) packs<1>(dim, [&](int, int column) { weights8(w, p.weight, p.weight_dtype, column); });
    const auto read = [&](Row<O, R, PACKS>& to, int64_t row) {
        if (row >= p.rows) return;
        packs<PACKS>(dim, [&](int i, int column) {
            to.grad[i] = load8<true>(grad + row * dim + column);
            to.total[i] = load8<true>(total + row * dim + column);
        });
        to.stats = {p.stats[row], p.stats[p.rows + row], p.stats[2 * p.rows + row]};
    };
    const int64_t step = int64_t{gridDim.x} * blockDim.y;
    Row<O, R, PACKS> now, next;
    read(now, int64_t{blockIdx.x} * blockDim.y + threadIdx.y);
    for (int64_t base = int64_t{blockIdx.x} * blockDim.y; base < p.rows; base += step) {  // as often for all threads
        const int64_t row = base + threadIdx.y, at = row * dim;
        const int real = row < p.rows ? dim : 0;
        Pack<R> more[PACKS];
        if (residual) packs<PACKS>(real, [&](int i, int column) { more[i] = load8<true>(residual + at + column); });
        if (AHEAD) read(next, row + step);
        float level = 0.0f, skewed = 0.0f;
        packs<PACKS>(real, [&](int i, int column) {
            if (PACKS > 1) weights8(w, p.weight, p.weight_dtype, column);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float d = to_float(now.grad[i].at[j]), h = now.stats.normal(to_float(now.total[i].at[j]));
                dw[i][j] = fmaf(d, h, dw[i][j]);
                db[i][j] += d;
                level = fmaf(d, w[j], level);
                skewed = fmaf(d * w[j], h, skewed);
            }
        });
        const float2 found = row_sums(level, skewed, p.centred, parts, turn);
        level = p.centred ? found.x / all : 0.0f, skewed = found.y / all;
        packs<PACKS>(real, [&](int i, int column) {
            if (PACKS > 1) weights8(w, p.weight, p.weight_dtype, column);
            Pack<R> d;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float g = to_float(now.grad[i].at[j]) * w[j], h = now.stats.normal(to_float(now.total[i].at[j]));
                const float own = (g - level - h * skewed) * now.stats.rstd;
                d.at[j] = from_float<R>(residual ? own + to_float(more[i].at[j]) : own);
            }
            store8<true>(stream + at + column, d);
            if (branch) {
                const uint32_t keep = p.seed ? kept8(at + column, key, p.threshold) : 0xFFu;
                const float scale = p.seed ? p.scale : 1.0f;
                Pack<T> b;
#pragma unroll
                for (int j = 0; j < 8; j++) b.at[j] = from_float<T>(keep >> j & 1 ? to_float(d.at[j]) * scale : 0.0f);
                store8<true>(branch + at + column, b);
            }
        });
        if (AHEAD) now = next;
        else read(now, row + step);
    }
    // the block's rows together, then one line of `partial`
    if (PACKS == 1 && blockDim.y > 1) {
        const auto at = [&](int y, int j) -> float& { return sums[((y * 16) + j) * blockDim.x + threadIdx.x]; };
#pragma unroll
        for (int j = 0; j < 8; j++) at(threadIdx.y, j) = dw[0][j], at(threadIdx.y, 8 + j) = db[0][j];
        __syncthreads();
        if (threadIdx.y) return;
        for (int y = 1; y < static_cast<int>(blockDim.y); y++)
#pragma unroll
            for (int j = 0; j < 8; j++) dw[0][j] += at(y, j), db[0][j] += at(y, 8 + j);
    }
    float* line = p.partial + int64_t{blockIdx.x} * (p.centred ? 2 : 1) * dim;
    packs<PACKS>(dim, [&](int i, int column) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            line[column + j] = dw[i][j];
            if (p.centred) line[dim + column + j] = db[i][j];
        }
    });
}

// Rows of any length and alignment: a block each; the sums for weight and bias are another kernel's.
template <class O, class R, class T>
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
        const float2 found = row_sums(level, skewed, p.centred, parts, turn);
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
            for (int j = 0; j < count; j++) {
                const float d = to_float(stream[at + c + j]) * (p.seed ? p.scale : 1.0f);
                static_cast<T*>(p.branch)[at + c + j] = from_float<T>(keep >> j & 1 ? d : 0.0f);
            }
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

template <class T, class R, class O>
void backward(const Problem& p, int64_t lines, bool vector, cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>(lines);
    if (!vector || p.dim > WIDEST) {
        const int threads = threads_for(p.dim, 128, 1024);
        norm_any_rows_backward<O, R, T><<<grid(p.rows, 1, 4096 / threads), threads, 0, stream>>>(p);
        norm_columns<O, R><<<dim3(static_cast<unsigned>((p.dim + 31) / 32), blocks), dim3(32, 8), 0, stream>>>(p);
    } else if (p.dim <= 2048) {
        const int threads = threads_for(p.dim, 256, 256);
        norm_rows_backward<O, R, T, 1><<<blocks, dim3(threads, 256 / threads), 0, stream>>>(p);
    } else {
        norm_rows_backward<O, R, T, 2><<<blocks, threads_for(p.dim, 512, 512), 0, stream>>>(p);
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
    p.partial = partial.as<float>(), p.rows = grad.shape.rows(), p.dim = dim;
    set_rate(p, seed, rate);
    const bool vector = dim % 8 == 0 && grad.aligned() && total.aligned() && more.aligned() && weight.aligned() &&
                        stream.aligned() && branch.aligned();
    const auto on = static_cast<cudaStream_t>(call.stream);
    const int64_t width = partial.shape.at[1] * dim;
    if (p.rows) MC_FOR_NORM(apart, total.dtype, grad.dtype, backward<T, R, O>(p, lines, vector, on))
    MC_FOR_FLOAT(weight.dtype, W, norm_add_partial<W><<<static_cast<unsigned>((width + 31) / 32), dim3(32, 16), 0, on>>>(
        p.partial, p.rows ? lines : 0, dim, width, dweight.as<W>(), dbias.as<W>()))
}
