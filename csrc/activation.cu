// Activations with a bias added first, act(x + bias), and gated ones, act(gate) * up; the backward computes all of it again.
//
// A thread keeps eight columns and walks down the rows, so that it reads their bias once and adds up its gradient in registers. A
// block is 32 packs of columns by 8 rows. Its part of the rows (`partial`, first axis: how many depends on the shape alone) ends in
// a row of fp32 sums; a second kernel adds the parts in their order. Without a bias rows are a fiction: any width will do.
#include "cuda.h"

namespace {

// NaN if x is
__device__ __forceinline__ float least(float limit, float x) {
#if __CUDA_ARCH__ >= 800
    float out;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(x), "f"(limit));
    return out;
#else
    return x > limit ? limit : x;
#endif
}
__device__ __forceinline__ float most(float limit, float x) {
#if __CUDA_ARCH__ >= 800
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(x), "f"(limit));
    return out;
#else
    return x < limit ? limit : x;
#endif
}
__device__ __forceinline__ float magnitude(float x) { return fabsf(x); }

// e^-x for x >= 0, and 1 / x for x from 1 to 2; the quick ones are 2 units in the last place off, of which 16 bits show nothing
template <bool FINE>
__device__ __forceinline__ float decay(float x) {
    return FINE ? expf(-x) : __expf(-x);
}
template <bool FINE>
__device__ __forceinline__ float inverse(float x) {
    return FINE ? __frcp_rn(x) : __fdividef(1.0f, x);
}

}  // namespace

#include "activation.h"

namespace {

constexpr int ACROSS = 32, DOWN = 8;  // packs of columns and rows of a block
constexpr int TILE = ACROSS * 8;      // its columns
constexpr int64_t WIDTH = 4096;       // of a row where there are none
constexpr int HEIGHT = 64;            // rows of a block where nothing is added up

template <class T>
constexpr bool fine = sizeof(T) == 4;

struct Grid {  // blocks: parts of the rows, each of `tiles` blocks
    int64_t count, dim, height, tiles;
    __host__ __device__ int64_t rows() const { return (count + dim - 1) / dim; }
};

// where a thread stands: its first column and how many it has, the rows of its block
struct Place {
    int64_t column, first, last;
    int columns;
    __device__ explicit Place(const Grid& grid) {
        column = blockIdx.x % grid.tiles * TILE + threadIdx.x * 8;
        columns = grid.dim - column >= 8 ? 8 : grid.dim > column ? static_cast<int>(grid.dim - column) : 0;
        first = blockIdx.x / grid.tiles * grid.height;
        last = first + grid.height < grid.rows() ? first + grid.height : grid.rows();
    }
    // elements of the pack at `at`: fewer at the end of all, where the last row may be a short one
    __device__ int left(const Grid& grid, int64_t at) const {
        return grid.count - at >= columns ? columns : grid.count > at ? static_cast<int>(grid.count - at) : 0;
    }
};

template <class T>
__device__ __forceinline__ void load_bias(float* to, const void* bias, bool wide, const Place& place) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        to[i] = 0.0f;
        if (bias && i < place.columns)
            to[i] = wide ? static_cast<const float*>(bias)[place.column + i] : to_float(static_cast<const T*>(bias)[place.column + i]);
    }
}

template <int KIND, class T, bool VECTOR>
__global__ __launch_bounds__(ACROSS * DOWN) void forward(const T* x, const void* bias, bool wide, T* y, Grid grid) {
    const Place place(grid);
    if (!place.columns) return;
    float added[8];
    load_bias<T>(added, bias, wide, place);
    constexpr int AHEAD = VECTOR ? 4 : 1;  // packs read before the first is used
    for (int64_t row = place.first + threadIdx.y; row < place.last; row += DOWN * AHEAD) {
        Pack<T> in[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            const int64_t at = (row + u * DOWN) * grid.dim + place.column;
            if (row + u * DOWN < place.last) in[u] = load8<VECTOR>(x + at, place.left(grid, at));
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            const int64_t at = (row + u * DOWN) * grid.dim + place.column;
            if (row + u * DOWN >= place.last) break;
            Pack<T> out;
#pragma unroll
            for (int i = 0; i < 8; i++) out.at[i] = from_float<T>(activate<KIND, fine<T>>(to_float(in[u].at[i]) + added[i]));
            store8<VECTOR>(y + at, out, place.left(grid, at));
        }
    }
}

template <int KIND, class T, bool VECTOR>
__global__ __launch_bounds__(ACROSS * DOWN) void backward(
    const T* grad, const T* x, const void* bias, bool wide, T* dx, float* partial, Grid grid) {
    const Place place(grid);
    float added[8], sums[8] = {};
    load_bias<T>(added, bias, wide, place);
    constexpr int AHEAD = VECTOR ? 2 : 1;
    if (place.columns)
        for (int64_t row = place.first + threadIdx.y; row < place.last; row += DOWN * AHEAD) {
            Pack<T> in[AHEAD], given[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                const int64_t at = (row + u * DOWN) * grid.dim + place.column;
                if (row + u * DOWN < place.last) {
                    in[u] = load8<VECTOR>(x + at, place.left(grid, at));
                    given[u] = load8<VECTOR>(grad + at, place.left(grid, at));
                }
            }
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                const int64_t at = (row + u * DOWN) * grid.dim + place.column;
                if (row + u * DOWN >= place.last) break;
                Pack<T> out;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float slope;
                    activate<KIND, fine<T>, true>(to_float(in[u].at[i]) + added[i], slope);
                    const float d = to_float(given[u].at[i]) * slope;
                    out.at[i] = from_float<T>(d);
                    sums[i] += d;
                }
                store8<VECTOR>(dx + at, out, place.left(grid, at));
            }
        }
    if (!partial) return;
    __shared__ float shared[DOWN][TILE];
#pragma unroll
    for (int i = 0; i < 8; i++) shared[threadIdx.y][threadIdx.x * 8 + i] = sums[i];
    __syncthreads();
    const int mine = threadIdx.y * ACROSS + threadIdx.x;  // one of the columns
    const int64_t column = place.column - threadIdx.x * 8 + mine;
    if (column >= grid.dim) return;
    float total = 0;
#pragma unroll
    for (int i = 0; i < DOWN; i++) total += shared[i][mine];
    partial[blockIdx.x / grid.tiles * grid.dim + column] = total;
}

template <class B>
__global__ void add_parts(const float* partial, B* out, int64_t parts, int64_t dim) {
    __shared__ float shared[DOWN][ACROSS];
    const int64_t column = int64_t{blockIdx.x} * ACROSS + threadIdx.x;
    float total = 0;
    if (column < dim)
        for (int64_t part = threadIdx.y; part < parts; part += DOWN) total += partial[part * dim + column];
    shared[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y || column >= dim) return;
    total = 0;
#pragma unroll
    for (int i = 0; i < DOWN; i++) total += shared[i][threadIdx.x];
    out[column] = from_float<B>(total);
}

template <int KIND, class T, bool VECTOR>
__global__ __launch_bounds__(256) void gated_forward(const T* gate, const T* up, T* y, int64_t count) {
    constexpr int AHEAD = VECTOR ? 2 : 1;
    const int64_t stride = int64_t{gridDim.x} * blockDim.x * 8;
    for (int64_t from = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 8; from < count; from += stride * AHEAD) {
        Pack<T> a[AHEAD], b[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            const int64_t at = from + u * stride;
            if (at < count) {
                const int left = count - at < 8 ? static_cast<int>(count - at) : 8;
                a[u] = load8<VECTOR>(gate + at, left), b[u] = load8<VECTOR>(up + at, left);
            }
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            const int64_t at = from + u * stride;
            if (at >= count) break;
            Pack<T> out;
#pragma unroll
            for (int i = 0; i < 8; i++) out.at[i] = from_float<T>(activate<KIND, fine<T>>(to_float(a[u].at[i])) * to_float(b[u].at[i]));
            store8<VECTOR>(y + at, out, count - at < 8 ? static_cast<int>(count - at) : 8);
        }
    }
}

template <int KIND, class T, bool VECTOR>
__global__ __launch_bounds__(256) void gated_backward(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t count) {
    const int64_t stride = int64_t{gridDim.x} * blockDim.x * 8;
    for (int64_t at = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 8; at < count; at += stride) {
        const int left = count - at < 8 ? static_cast<int>(count - at) : 8;
        const Pack<T> g = load8<VECTOR>(grad + at, left), a = load8<VECTOR>(gate + at, left), b = load8<VECTOR>(up + at, left);
        Pack<T> da, db;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float slope;
            const float value = activate<KIND, fine<T>, true>(to_float(a.at[i]), slope), given = to_float(g.at[i]);
            da.at[i] = from_float<T>(given * to_float(b.at[i]) * slope);
            db.at[i] = from_float<T>(given * value);
        }
        store8<VECTOR>(dgate + at, da, left);
        store8<VECTOR>(dup + at, db, left);
    }
}

const dim3 BLOCK(ACROSS, DOWN);

}  // namespace

MC_KERNEL(activation) {
    const Array x = call.in("x", FLOATS);
    const Array bias = call.maybe("bias", FLOATS, Shape{x.shape.last()});
    const int64_t kind = call.integer("kind", 0, KINDS - 1);
    const Array y = call.out("y", x.dtype, x.shape);
    if (bias && bias.dtype != x.dtype && bias.dtype != F32) call.refuse("bias: another dtype than x, and not float32");
    call.ready();
    Grid grid{x.shape.count(), bias ? x.shape.last() : WIDTH, HEIGHT, 0};
    if (!grid.count) return;
    grid.tiles = (grid.dim + TILE - 1) / TILE;
    const int64_t blocks = (grid.rows() + HEIGHT - 1) / HEIGHT * grid.tiles;
    const bool vector = x.aligned() && y.aligned() && grid.dim % 8 == 0, wide = bias.dtype == F32;
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(x.dtype, T, MC_FOR_KIND(kind, KIND, MC_FOR_BOOL(vector, VECTOR,
        forward<KIND, T, VECTOR><<<static_cast<unsigned>(blocks), BLOCK, 0, stream>>>(x.as<T>(), bias.data, wide, y.as<T>(), grid))))
}

MC_KERNEL(activation_backward) {
    const Array grad = call.in("grad", FLOATS);
    const Array x = call.in("x", grad.dtype, grad.shape);
    const int64_t dim = x.shape.last();
    const Array bias = call.maybe("bias", FLOATS, Shape{dim});
    const int64_t kind = call.integer("kind", 0, KINDS - 1), parts = call.integer("parts", 1);
    const Array dx = call.out("dx", x.dtype, x.shape);
    const Array partial = call.maybe_out("partial", F32, Shape{parts, dim});
    const Array dbias = call.maybe_out("dbias", FLOATS, Shape{dim});
    if (partial.given != dbias.given) call.refuse("partial and dbias go together");
    if (bias && bias.dtype != x.dtype && bias.dtype != F32) call.refuse("bias: another dtype than x, and not float32");
    call.ready();
    const auto stream = static_cast<cudaStream_t>(call.stream);
    const bool flat = !bias && !partial;
    Grid grid{x.shape.count(), flat ? WIDTH : dim, HEIGHT, 0};
    int64_t used = 0;  // parts that have rows
    if (grid.count) {
        if (partial) grid.height = (grid.rows() + parts - 1) / parts;
        used = (grid.rows() + grid.height - 1) / grid.height;
        grid.tiles = (grid.dim + TILE - 1) / TILE;
        const bool vector = grad.aligned() && x.aligned() && dx.aligned() && grid.dim % 8 == 0, wide = bias.dtype == F32;
        MC_FOR_FLOAT(x.dtype, T, MC_FOR_KIND(kind, KIND, MC_FOR_BOOL(vector, VECTOR,
            backward<KIND, T, VECTOR><<<static_cast<unsigned>(used * grid.tiles), BLOCK, 0, stream>>>(
                grad.as<T>(), x.as<T>(), bias.data, wide, dx.as<T>(), partial.as<float>(), grid))))
    }
    if (!dbias || !dim) return;
    const auto blocks = static_cast<unsigned>((dim + ACROSS - 1) / ACROSS);
    MC_FOR_FLOAT(dbias.dtype, B, add_parts<B><<<blocks, BLOCK, 0, stream>>>(partial.as<float>(), dbias.as<B>(), used, dim))
}

MC_KERNEL(gated) {
    const Array gate = call.in("gate", FLOATS);
    const Array up = call.in("up", gate.dtype, gate.shape);
    const int64_t kind = call.integer("kind", 0, KINDS - 1);
    const Array y = call.out("y", gate.dtype, gate.shape);
    call.ready();
    const int64_t count = gate.shape.count();
    if (!count) return;
    const bool vector = gate.aligned() && up.aligned() && y.aligned();
    const int blocks = ::grid((count + 15) / 16, 256, 64);
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(gate.dtype, T, MC_FOR_KIND(kind, KIND, MC_FOR_BOOL(vector, VECTOR,
        gated_forward<KIND, T, VECTOR><<<blocks, 256, 0, stream>>>(gate.as<T>(), up.as<T>(), y.as<T>(), count))))
}

MC_KERNEL(gated_backward) {
    const Array grad = call.in("grad", FLOATS);
    const Array gate = call.in("gate", grad.dtype, grad.shape);
    const Array up = call.in("up", grad.dtype, grad.shape);
    const int64_t kind = call.integer("kind", 0, KINDS - 1);
    const Array dgate = call.out("dgate", grad.dtype, grad.shape);
    const Array dup = call.out("dup", grad.dtype, grad.shape);
    call.ready();
    const int64_t count = grad.shape.count();
    if (!count) return;
    const bool vector = grad.aligned() && gate.aligned() && up.aligned() && dgate.aligned() && dup.aligned();
    const int blocks = ::grid((count + 7) / 8, 256, 64);
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(grad.dtype, T, MC_FOR_KIND(kind, KIND, MC_FOR_BOOL(vector, VECTOR,
        gated_backward<KIND, T, VECTOR><<<blocks, 256, 0, stream>>>(
            grad.as<T>(), gate.as<T>(), up.as<T>(), dgate.as<T>(), dup.as<T>(), count))))
}
