// Adafactor on CUDA: matrices of one shape in three passes. The first adds up the squares of gradients by row and by column, and those
// of parameters. The second adds up the squares of the steps, which are gradients times a number for each row and one for each column.
// The third takes the steps. In all a matrix is read or written six times, and no step is ever in memory.
//
// A block has a tile: a band of rows, 512 columns of it. Its warps take the rows in turn, a lane always the same 16 columns. What
// blocks find goes to `partial`, which a second kernel adds up in a fixed order: the same bits every time, and for each matrix those
// that it has alone. Pointers are arguments of the launch.
#include "cuda.h"

namespace {

using mc::List;

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int MINE = 16, WIDTH = 32 * MINE;  // columns of a lane, of a tile; optim/adafactor.py has WIDTH, BAND and BANDS as well
constexpr int64_t BAND = 64, BANDS = 256;    // rows of a tile, unless there were too many of them
constexpr int AT_ONCE = 240;                 // matrices of a launch, whose arguments are 4 KB at most

struct Pointers {
    const void* grads[AT_ONCE];
    void* params[AT_ONCE];
};

// Matrices of one shape, and their tiles.
struct Matrices {
    int64_t rows, columns, bands, across, height;  // bands of `height` rows, each of as many tiles
    Matrices(int64_t rows, int64_t columns) : rows(rows), columns(columns) {
        const int64_t wanted = (rows + BAND - 1) / BAND;
        bands = wanted < 1 ? 1 : wanted < BANDS ? wanted : BANDS;
        across = columns > WIDTH ? (columns + WIDTH - 1) / WIDTH : 1;
        height = (rows + bands - 1) / bands;
    }
    __host__ __device__ int64_t tiles() const { return bands * across; }
    __device__ int64_t tile() const { return int64_t{blockIdx.y} * across + blockIdx.x; }  // this block's
    // What is kept of one: sums of rows for each column of tiles, of columns for each band, of parameters for each tile.
    __host__ __device__ int64_t partial() const { return across * rows + bands * columns + tiles(); }
};

// The 16 columns of a lane, of one row; beyond the last zeros. VECTOR: rows are aligned and whole packs.
template <class T, bool VECTOR>
struct Lane {
    static constexpr int N = SPAN<T>, PACKS = MINE / N;
    Pack<T, N> packs[PACKS];

    static __device__ __forceinline__ int64_t column(int u) {
        return int64_t{blockIdx.x} * WIDTH + u * 32 * N + threadIdx.x % 32 * N;
    }
    __device__ __forceinline__ void read(const T* row, int64_t columns) {
#pragma unroll
        for (int u = 0; u < PACKS; u++) {
            const int count = some<N, VECTOR>(column(u), columns);
            packs[u] = load<VECTOR, N>(row + column(u), count);
        }
    }
    __device__ __forceinline__ void numbers(float (&to)[MINE]) const {
#pragma unroll
        for (int u = 0; u < PACKS; u++) spread(packs[u], *reinterpret_cast<float(*)[N]>(to + u * N));
    }
    static __device__ __forceinline__ void write(T* row, float (&from)[MINE], int64_t columns) {
#pragma unroll
        for (int u = 0; u < PACKS; u++) {
            const int count = some<N, VECTOR>(column(u), columns);
            if (count) store<VECTOR>(row + column(u), rounded<T>(*reinterpret_cast<float(*)[N]>(from + u * N)), count);
        }
    }
    // Numbers for columns, in fp32 whatever the matrices are.
    static __device__ __forceinline__ void given(const float* by_column, int64_t columns, float (&to)[MINE]) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int64_t at = column(i / N) + i % N;
            to[i] = at < columns ? by_column[at] : 0.0f;
        }
    }
};

// f(row) for the rows of this tile that are this warp's.
template <class F>
__device__ __forceinline__ void rows_of_tile(const Matrices& m, F f) {
    const int64_t begin = int64_t{blockIdx.y} * m.height, end = begin + m.height < m.rows ? begin + m.height : m.rows;
    for (int64_t row = begin + threadIdx.x / 32; row < end; row += WARPS) f(row);
}

// The sum of what all threads have; to be called by all of them, once in a kernel.
__device__ __forceinline__ float block_total(float x) {
    __shared__ float warps[WARPS];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) total += warps[i];
    return total;
}

template <class T, bool VECTOR>
__global__ void __launch_bounds__(THREADS, 3) sum_squares(const Pointers at, const Matrices m, const float* factor,
                                                          float* partial) {
    if (!present<T>) return;
    __shared__ float board[WARPS][WIDTH];
    const T* const g = static_cast<const T*>(at.grads[blockIdx.z]);
    const T* const p = static_cast<const T*>(at.params[blockIdx.z]);
    float* const mine = partial + int64_t{blockIdx.z} * m.partial();
    float* const of_rows = mine + int64_t{blockIdx.x} * m.rows;
    float* const of_columns = mine + m.across * m.rows + int64_t{blockIdx.y} * m.columns;
    float* const of_params = mine + m.across * m.rows + m.bands * m.columns + m.tile();
    const float by = factor ? *factor : 1.0f;
    float sums[MINE] = {}, weights = 0.0f;
    rows_of_tile(m, [&](int64_t row) {
        Lane<T, VECTOR> gs, ps;
        gs.read(g + row * m.columns, m.columns), ps.read(p + row * m.columns, m.columns);
        float x[MINE], y[MINE], total = 0.0f;
        gs.numbers(x), ps.numbers(y);
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            x[i] *= by;
            sums[i] = fmaf(x[i], x[i], sums[i]), total = fmaf(x[i], x[i], total), weights = fmaf(y[i], y[i], weights);
        }
        total = warp_sum(total);
        if (threadIdx.x % 32 == 0) of_rows[row] = total;
    });
    weights = block_total(weights);
    if (threadIdx.x == 0) *of_params = weights;
#pragma unroll
    for (int i = 0; i < MINE; i++) board[threadIdx.x / 32][Lane<T, VECTOR>::column(i / SPAN<T>) % WIDTH + i % SPAN<T>] = sums[i];
    __syncthreads();
    for (int i = threadIdx.x; i < WIDTH; i += THREADS) {
        const int64_t column = int64_t{blockIdx.x} * WIDTH + i;
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) total += board[warp][i];
        if (column < m.columns) of_columns[column] = total;
    }
}

// lengths: a number for each tile
template <class T, bool VECTOR>
__global__ void __launch_bounds__(THREADS, 3) sum_steps(const Pointers at, const Matrices m, const float* factor,
                                                        const float* by_row, const float* by_column, float* lengths) {
    if (!present<T>) return;
    const T* const g = static_cast<const T*>(at.grads[blockIdx.z]);
    const float* const of_row = by_row + int64_t{blockIdx.z} * m.rows;
    const float by = factor ? *factor : 1.0f;
    float columns[MINE], length = 0.0f;
    Lane<T, VECTOR>::given(by_column + int64_t{blockIdx.z} * m.columns, m.columns, columns);
    rows_of_tile(m, [&](int64_t row) {
        Lane<T, VECTOR> gs;
        gs.read(g + row * m.columns, m.columns);
        const float mine = of_row[row];
        float x[MINE];
        gs.numbers(x);
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const float step = x[i] * by * mine * columns[i];
            length = fmaf(step, step, length);
        }
    });
    length = block_total(length);
    if (threadIdx.x == 0) lengths[int64_t{blockIdx.z} * m.tiles() + m.tile()] = length;
}

template <class T, bool VECTOR>
__global__ void __launch_bounds__(THREADS, 3) step(const Pointers at, const Matrices m, const float* factor, const float* by_row,
                                                   const float* by_column, const float* scale, const float* decay) {
    if (!present<T>) return;
    const T* const g = static_cast<const T*>(at.grads[blockIdx.z]);
    T* const p = static_cast<T*>(at.params[blockIdx.z]);
    const float* const of_row = by_row + int64_t{blockIdx.z} * m.rows;
    const float by = factor ? *factor : 1.0f, rate = scale[blockIdx.z], keep = *decay;
    float columns[MINE];
    Lane<T, VECTOR>::given(by_column + int64_t{blockIdx.z} * m.columns, m.columns, columns);
    rows_of_tile(m, [&](int64_t row) {
        Lane<T, VECTOR> gs, ps;
        gs.read(g + row * m.columns, m.columns), ps.read(p + row * m.columns, m.columns);
        const float mine = of_row[row];
        float x[MINE], y[MINE];
        gs.numbers(x), ps.numbers(y);
#pragma unroll
        for (int i = 0; i < MINE; i++) y[i] = fmaf(x[i] * by * mine * columns[i], rate, y[i] * keep);
        Lane<T, VECTOR>::write(p + row * m.columns, y, m.columns);
    });
}

// out[c] for 32 of `width` columns, which are the sums of as many lines as `count`
__device__ __forceinline__ void add_into(const float* lines, int64_t count, int64_t width, int64_t first, float* out) {
    add_lines(lines, count, width, first, [out](int64_t c, float sum) { out[c] = sum; });
}

// sums: of each matrix that of its parameters, those of its rows, those of its columns
__global__ void __launch_bounds__(512) add_squares(const Matrices m, const float* partial, float* sums) {
    const float* const of_rows = partial + int64_t{blockIdx.y} * m.partial();
    const float* const of_columns = of_rows + m.across * m.rows;
    float* const out = sums + int64_t{blockIdx.y} * (1 + m.rows + m.columns);
    const int64_t rows = (m.rows + 31) / 32, block = blockIdx.x;
    if (block == 0) add_into(of_columns + m.bands * m.columns, m.tiles(), 1, 0, out);
    else if (block <= rows) add_into(of_rows, m.across, m.rows, (block - 1) * 32, out + 1);
    else add_into(of_columns, m.bands, m.columns, (block - 1 - rows) * 32, out + 1 + m.rows);
}

__global__ void __launch_bounds__(512) add_lengths(const Matrices m, const float* partial, float* lengths) {
    add_into(partial + int64_t{blockIdx.x} * m.tiles(), m.tiles(), 1, 0, lengths + blockIdx.x);
}

// Launch f(at, first, blocks, vector) for as many matrices at once as a launch has pointers for.
template <class F>
void for_some(const Matrices& m, const List& grads, const List& params, F f) {
    for (int64_t first = 0; first < grads.n; first += AT_ONCE) {
        Pointers at;
        const int64_t here = grads.n - first < AT_ONCE ? grads.n - first : AT_ONCE;
        bool vector = m.columns % 8 == 0;
        for (int64_t i = 0; i < here; i++) {
            at.grads[i] = grads[first + i].data, at.params[i] = params.n ? params[first + i].data : nullptr;
            vector = vector && (reinterpret_cast<uintptr_t>(at.grads[i]) | reinterpret_cast<uintptr_t>(at.params[i])) % 16 == 0;
        }
        f(at, first, dim3(static_cast<unsigned>(m.across), static_cast<unsigned>(m.bands), static_cast<unsigned>(here)), vector);
    }
}

void check(Call& call, const char* name, const List& list, int64_t count, const Matrices& m) {
    if (list.n != count) call.refuse("%s: another number of matrices", name);
    for (int64_t i = 0; i < list.n; i++)
        if (list[i].count != m.rows * m.columns) call.refuse("%s: another number of elements than rows times columns", name);
}

}  // namespace

MC_KERNEL(adafactor_sums) {
    const Array sums = call.inout("sums", F32);
    const List grads = call.list("grads", FLOATS, false);
    const List params = call.list("params", grads.dtype, false);
    const int64_t rows = call.integer("rows", 0, INT32_MAX), columns = call.integer("columns", 0, INT32_MAX);
    const Matrices m(rows, columns);
    const Array partial = call.out("partial", F32, Shape{grads.n, m.partial()});
    const Array factor = call.maybe("factor", F32, Shape{});
    check(call, "grads", grads, grads.n, m), check(call, "params", params, grads.n, m);
    if (!(sums.shape == Shape{grads.n, 1 + m.rows + m.columns})) call.refuse("sums: for each matrix one, its rows and its columns");
    call.ready();
    check_present(call, grads.dtype);
    const auto ends = static_cast<unsigned>(1 + (m.rows + 31) / 32 + (m.columns + 31) / 32);
    const auto stream = static_cast<cudaStream_t>(call.stream);
    for_some(m, grads, params, [&](const Pointers& at, int64_t first, dim3 blocks, bool vector) {
        float* const found = partial.as<float>() + first * m.partial();
        MC_FOR_FLOAT(grads.dtype, T, MC_FOR_BOOL(vector, VECTOR,
            sum_squares<T, VECTOR><<<blocks, THREADS, 0, stream>>>(at, m, factor.as<float>(), found)))
        add_squares<<<dim3(ends, blocks.z), dim3(32, 16), 0, stream>>>(m, found, sums.as<float>() + first * sums.shape.last());
    });
}

MC_KERNEL(adafactor_length) {
    const Array lengths = call.inout("lengths", F32);
    const List grads = call.list("grads", FLOATS, false);
    const Array by_row = call.in("by_row", F32), by_column = call.in("by_column", F32);
    const Matrices m(by_row.shape.last(), by_column.shape.last());
    if (!(by_row.shape == Shape{grads.n, m.rows}) || !(by_column.shape == Shape{grads.n, m.columns}))
        call.refuse("by_row, by_column: numbers for each matrix are wanted");
    const Array partial = call.out("partial", F32, Shape{grads.n, m.tiles()});
    const Array factor = call.maybe("factor", F32, Shape{});
    check(call, "grads", grads, grads.n, m);
    if (!(lengths.shape == Shape{grads.n})) call.refuse("lengths: one for each matrix");
    call.ready();
    check_present(call, grads.dtype);
    const auto stream = static_cast<cudaStream_t>(call.stream);
    for_some(m, grads, List{}, [&](const Pointers& at, int64_t first, dim3 blocks, bool vector) {
        float* const found = partial.as<float>() + first * m.tiles();
        MC_FOR_FLOAT(grads.dtype, T, MC_FOR_BOOL(vector, VECTOR, sum_steps<T, VECTOR><<<blocks, THREADS, 0, stream>>>(
            at, m, factor.as<float>(), by_row.as<float>() + first * m.rows, by_column.as<float>() + first * m.columns, found)))
        add_lengths<<<blocks.z, dim3(32, 16), 0, stream>>>(m, found, lengths.as<float>() + first);
    });
}

MC_KERNEL(adafactor_step) {
    const Array decay = call.in("decay", F32, Shape{});
    const List params = call.list("params", FLOATS, true);
    const List grads = call.list("grads", params.dtype, false);
    const Array by_row = call.in("by_row", F32), by_column = call.in("by_column", F32);
    const Matrices m(by_row.shape.last(), by_column.shape.last());
    if (!(by_row.shape == Shape{grads.n, m.rows}) || !(by_column.shape == Shape{grads.n, m.columns}))
        call.refuse("by_row, by_column: numbers for each matrix are wanted");
    const Array scale = call.in("scale", F32, Shape{grads.n});
    const Array factor = call.maybe("factor", F32, Shape{});
    check(call, "params", params, grads.n, m), check(call, "grads", grads, grads.n, m);
    call.ready();
    check_present(call, params.dtype);
    const auto stream = static_cast<cudaStream_t>(call.stream);
    for_some(m, grads, params, [&](const Pointers& at, int64_t first, dim3 blocks, bool vector) {
        MC_FOR_FLOAT(params.dtype, T, MC_FOR_BOOL(vector, VECTOR, step<T, VECTOR><<<blocks, THREADS, 0, stream>>>(
            at, m, factor.as<float>(), by_row.as<float>() + first * m.rows, by_column.as<float>() + first * m.columns,
            scale.as<float>() + first, decay.as<float>())))
    });
}
