// Weights in 4 bits (NF4) and 8 bits: quantise, dequantise, and the product with a few rows of activations, which reads the codes
// themselves. Bytes and scales are the CPU's to the bit: divisions are IEEE's.
#include <type_traits>

#include "cuda.h"
#include "quantize.h"

namespace {

constexpr int THREADS = 256;
constexpr int TILE = 4;    // rows of the weight that a block of a product does at once: they share what is read of x
constexpr int WARPS = 4;   // of that block, which share the columns
constexpr int PAIR = 2;    // rows that a thread dequantises at once

__constant__ float levels[16] = {MC_NF4_LEVELS};
__constant__ float middles[16] = {MC_NF4_MIDDLES, 0};

// A table of 16 in shared memory: different entries lie in different banks and equal ones are one read, so no lookup waits.
__device__ __forceinline__ void share_table(float* shared, const float* table) {
    if (threadIdx.x < 16) shared[threadIdx.x] = table[threadIdx.x];
    __syncthreads();
}

// The code of weight i of the 8 in a word, whose bytes hold the earlier weight of a pair in the high half.
__device__ __forceinline__ uint32_t code_of(uint32_t word, int i) { return word >> (i / 2 * 8 + (i % 2 ? 0 : 4)) & 15; }

// Byte i of a word as a signed number: 2^23 + 128 + it is a float whose last byte it is, but for the sign.
__device__ __forceinline__ float signed_of(uint32_t word, int i) {
    return __uint_as_float(__byte_perm(word ^ 0x80808080u, 0x4B000000u, 0x7440 + i)) - 8388736.0f;
}

__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }  // in order; NaN is the largest
__device__ __forceinline__ float scale_of(uint32_t top) {
    const float scale = __uint_as_float(top);
    return scale < TINY ? 0.0f : scale;
}

// ---- NF4

// A group of 64 for every 8 lanes. VECTOR: whole packs of x may be read, and whole words of codes written.
template <class T, bool VECTOR>
__global__ void quantize4(const T* x, uint8_t* codes, float* scales, int64_t rows, int64_t cols) {
    if (!present<T>) return;
    __shared__ float middle[16];
    share_table(middle, middles);
    const int64_t bytes = (cols + 1) / 2, groups = (cols + GROUP - 1) / GROUP, all = rows * groups;
    for (int64_t first = blockIdx.x * int64_t{THREADS / 8}; first < all; first += gridDim.x * int64_t{THREADS / 8}) {  // whole blocks
        const int64_t group = first + threadIdx.x / 8;
        int64_t row = 0, col = 0;
        int count = 0;
        if (group < all) {
            row = rows == 1 ? 0 : group / groups;
            col = (group - row * groups) * GROUP + threadIdx.x % 8 * 8;
            count = cols - col >= 8 ? 8 : cols > col ? static_cast<int>(cols - col) : 0;
        }
        float in[8];
        spread(load8<VECTOR>(x + row * cols + col, count), in);
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) top = max(top, magnitude(in[i]));
#pragma unroll
        for (int lane = 4; lane; lane /= 2) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, lane));
        const float scale = scale_of(top), by = scale == 0 ? 1.0f : scale;
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float level = __fdiv_rn(in[i], by);
            uint32_t code = level > middle[7] ? 8 : 0;  // how many middles are below: none for a NaN
            code += level > middle[code + 3] ? 4 : 0;
            code += level > middle[code + 1] ? 2 : 0;
            code += level > middle[code] ? 1 : 0;
            word |= (i < count ? code : ZERO_CODE) << (i / 2 * 8 + (i % 2 ? 0 : 4));
        }
        uint8_t* to = codes + row * bytes + col / 2;
        if (VECTOR && count == 8) {
            *reinterpret_cast<uint32_t*>(to) = word;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (2 * i < count) to[i] = static_cast<uint8_t>(word >> 8 * i);
        }
        if (group < all && threadIdx.x % 8 == 0) scales[group] = scale;
    }
}

// All rows as one, aligned: a thread writes 16 bytes, its warp 512 in a row. The next codes are under way while these are written.
template <class T>
__global__ void dequantize4(const uint8_t* __restrict__ codes, const float* __restrict__ scales, T* __restrict__ y, int64_t n) {
    if (!present<T>) return;
    constexpr int EACH = 16 / sizeof(T);
    using Word = typename std::conditional<EACH == 8, uint32_t, uint16_t>::type;
    __shared__ float table[16];
    share_table(table, levels);
    const int64_t step = gridDim.x * int64_t{THREADS}, whole = n / EACH;
    int64_t i = blockIdx.x * int64_t{THREADS} + threadIdx.x;
    uint32_t next = i < whole ? reinterpret_cast<const Word*>(codes)[i] : 0;
    float next_scale = i < whole ? scales[i * EACH / GROUP] : 0.0f;
    for (; i < whole; i += step) {
        const uint32_t word = next;
        const float scale = next_scale;
        if (i + step < whole) {
            next = reinterpret_cast<const Word*>(codes)[i + step];
            next_scale = scales[(i + step) * EACH / GROUP];
        }
        float out[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) out[j] = table[code_of(word, j)] * scale;
        store<true>(y + i * EACH, rounded<T>(out));
    }
    if (blockIdx.x == 0 && threadIdx.x < n - whole * EACH) {  // what is left of a last row
        const int64_t at = whole * EACH + threadIdx.x;
        y[at] = from_float<T>(table[code_of(codes[at / 2], at % 2)] * scales[at / GROUP]);
    }
}

// Any rows, any alignment: a byte, two weights, for a thread.
template <class T>
__global__ void dequantize4_any(const uint8_t* codes, const float* scales, T* y, int64_t rows, int64_t cols) {
    if (!present<T>) return;
    __shared__ float table[16];
    share_table(table, levels);
    const int64_t bytes = (cols + 1) / 2, groups = (cols + GROUP - 1) / GROUP;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
        for (int64_t i = blockIdx.x * int64_t{THREADS} + threadIdx.x; i < bytes; i += gridDim.x * int64_t{THREADS}) {
            const uint32_t byte = codes[row * bytes + i];
            const float scale = scales[row * groups + 2 * i / GROUP];
            T* to = y + row * cols + 2 * i;
            to[0] = from_float<T>(table[byte >> 4] * scale);
            if (2 * i + 1 < cols) to[1] = from_float<T>(table[byte & 15] * scale);
        }
}

// ---- int8

template <class T, bool X>
__global__ void quantize8(const T* x, int8_t* codes, float* scales, int64_t rows, int64_t cols) {
    if (!present<T>) return;
    __shared__ uint32_t tops[THREADS / 32];
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* from = x + row * cols;
        uint32_t top = 0;
        for (int64_t at = threadIdx.x * int64_t{8}; at < cols; at += THREADS * 8) {
            float in[8];
            spread(load8<X>(from + at, cols - at < 8 ? static_cast<int>(cols - at) : 8), in);
#pragma unroll
            for (int i = 0; i < 8; i++) top = max(top, magnitude(in[i]));
        }
#pragma unroll
        for (int lane = 16; lane; lane /= 2) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, lane));
        if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < THREADS / 32; i++) top = max(top, tops[i]);
        __syncthreads();  // all have read before the next row writes
        const float scale = scale_of(top), step = scale == 0 ? 1.0f : __fdiv_rn(scale, 127.0f);
        if (threadIdx.x == 0) scales[row] = scale;
        for (int64_t at = threadIdx.x * int64_t{8}; at < cols; at += THREADS * 8) {
            const int count = cols - at < 8 ? static_cast<int>(cols - at) : 8;
            float in[8];
            spread(load8<X>(from + at, count), in);
            Pack<int8_t> out;
#pragma unroll
            for (int i = 0; i < 8; i++) out.at[i] = static_cast<int8_t>(__float2int_rn(__fdiv_rn(in[i], step)));  // NaN: 0
            int8_t* to = codes + row * cols + at;
            if (X && count == 8) {
                *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(&out);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (i < count) to[i] = out.at[i];
            }
        }
    }
}

// A thread has the same columns of two rows, whose codes are under way together. So many blocks, and not a chip full that goes on from row
// to row, take 0.95 of the time. `strips`: the blocks of a row.
template <class T, bool VECTOR>
__global__ void __launch_bounds__(THREADS)
dequantize8(const int8_t* __restrict__ codes, const float* __restrict__ scales, T* __restrict__ y, int64_t rows, int64_t cols,
            uint32_t strips) {
    if (!present<T>) return;
    constexpr int EACH = VECTOR ? 16 / sizeof(T) : 1;
    using Codes = std::conditional_t<EACH == 8, uint2, std::conditional_t<EACH == 4, uint32_t, uint8_t>>;
    const uint32_t pair = blockIdx.x / strips, strip = blockIdx.x - pair * strips;
    const int64_t first = pair * int64_t{PAIR}, col = (strip * int64_t{THREADS} + threadIdx.x) * EACH;
    if (col >= cols) return;
    uint32_t words[PAIR][2];
    float scale[PAIR];
#pragma unroll
    for (int r = 0; r < PAIR; r++) {
        const int64_t row = first + r < rows ? first + r : first;  // a row that is not there is the one before, and never written
        const Codes read = *reinterpret_cast<const Codes*>(codes + row * cols + col);
        if constexpr (EACH == 8) words[r][0] = read.x, words[r][1] = read.y;
        else words[r][0] = read;
        scale[r] = scales[row];
    }
#pragma unroll
    for (int r = 0; r < PAIR; r++) {
        if (first + r >= rows) continue;
        float out[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const float q = signed_of(words[r][j / 4], j % 4);
            out[j] = (q * HIGH + q * LOW) * scale[r];
        }
        T* to = y + (first + r) * cols + col;
        if constexpr (VECTOR) store<true>(to, rounded<T>(out));
        else *to = from_float<T>(out[0]);
    }
}

// ---- products: how a format reads 8 weights of a row, as levels to be multiplied by `scale`, and by `last` when all are summed

struct Nf4 {
    using Codes = uint32_t;
    static constexpr bool TABLE = true;
    template <bool VECTOR>
    static __device__ __forceinline__ Codes read(const uint8_t* codes, int64_t row, int64_t cols, int64_t at) {
        const uint8_t* from = codes + row * ((cols + 1) / 2) + at / 2;
        if (VECTOR) return *reinterpret_cast<const uint32_t*>(from);
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (at + 2 * i < cols) word |= uint32_t{from[i]} << 8 * i;
        return word;
    }
    static __device__ __forceinline__ float level(const Codes& codes, int i, const float* table) { return table[code_of(codes, i)]; }
    static __device__ __forceinline__ float scale(const float* scales, int64_t row, int64_t cols, int64_t at) {
        return scales[row * ((cols + GROUP - 1) / GROUP) + at / GROUP];
    }
    static __device__ __forceinline__ float last(const float*, int64_t) { return 1.0f; }
};

struct Int8 {
    using Codes = uint2;
    static constexpr bool TABLE = false;
    template <bool VECTOR>
    static __device__ __forceinline__ Codes read(const uint8_t* codes, int64_t row, int64_t cols, int64_t at) {
        const uint8_t* from = codes + row * cols + at;
        if (VECTOR) return *reinterpret_cast<const uint2*>(from);
        uint32_t words[2] = {};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (at + i < cols) words[i / 4] |= uint32_t{from[i]} << i % 4 * 8;
        return {words[0], words[1]};
    }
    static __device__ __forceinline__ float level(const Codes& codes, int i, const float*) {
        return signed_of(i < 4 ? codes.x : codes.y, i % 4);
    }
    static __device__ __forceinline__ float scale(const float*, int64_t, int64_t, int64_t) { return 1.0f; }
    static __device__ __forceinline__ float last(const float* scales, int64_t row) { return scales[row] / 127.0f; }
};

// y (n rows) = x (n cols) @ W^T + bias, n <= N. VECTOR: cols is a multiple of 8 and all is aligned. A sum is always formed in the same order.
template <class Format, class T, int N, bool VECTOR>
__global__ void __launch_bounds__(WARPS * 32)
product(const T* __restrict__ x, const uint8_t* __restrict__ codes, const float* __restrict__ scales, const T* __restrict__ bias,
        T* __restrict__ y, int n, int64_t rows, int64_t cols) {
    if (!present<T>) return;
    __shared__ float table[16];
    __shared__ float parts[WARPS][TILE * N];
    if (Format::TABLE) share_table(table, levels);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int64_t first = blockIdx.x * int64_t{TILE}; first < rows; first += gridDim.x * int64_t{TILE}) {
        float sums[TILE][N] = {};
#pragma unroll(N <= 2 ? 2 : 1)
        for (int64_t at = threadIdx.x * int64_t{8}; at < cols; at += WARPS * 32 * 8) {
            typename Format::Codes read[TILE];
            float by[TILE];
#pragma unroll
            for (int r = 0; r < TILE; r++) {  // rows that are not there are the last one again, and never written
                const int64_t row = first + r < rows ? first + r : rows - 1;
                read[r] = Format::template read<VECTOR>(codes, row, cols, at);
                by[r] = Format::scale(scales, row, cols, at);
            }
            float part[TILE][N] = {};
            const auto add = [&](int j, const float (&in)[N]) {
#pragma unroll
                for (int r = 0; r < TILE; r++) {
                    const float level = Format::level(read[r], j, table);
#pragma unroll
                    for (int i = 0; i < N; i++) part[r][i] += level * in[i];
                }
            };
            if constexpr (VECTOR) {
                float in[8][N];
#pragma unroll
                for (int i = 0; i < N; i++) {
                    float row[8];
                    spread(load8<true>(x + (i < n ? i : n - 1) * cols + at), row);
#pragma unroll
                    for (int j = 0; j < 8; j++) in[j][i] = row[j];
                }
#pragma unroll
                for (int j = 0; j < 8; j++) add(j, in[j]);
            } else {
#pragma unroll 1
                for (int j = 0; j < 8 && at + j < cols; j++) {
                    float in[N];
#pragma unroll
                    for (int i = 0; i < N; i++) in[i] = to_float(x[(i < n ? i : n - 1) * cols + at + j]);
                    add(j, in);
                }
            }
#pragma unroll
            for (int r = 0; r < TILE; r++)
#pragma unroll
                for (int i = 0; i < N; i++) sums[r][i] += part[r][i] * by[r];
        }
#pragma unroll
        for (int r = 0; r < TILE; r++)
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float sum = warp_sum(sums[r][i]);
                if (lane == 0) parts[warp][r * N + i] = sum;
            }
        __syncthreads();
        if (threadIdx.x < TILE * N) {
            const int64_t row = first + threadIdx.x / N;
            const int i = threadIdx.x % N;
            if (row < rows && i < n) {
                float sum = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++) sum += parts[w][threadIdx.x];
                y[i * rows + row] = from_float<T>(sum * Format::last(scales, row) + (bias ? to_float(bias[row]) : 0.0f));
            }
        }
        __syncthreads();  // all has been read before the next rows are written
    }
}

struct Matrix {  // rows whose groups need no filling are one row
    int64_t rows, cols;
    Matrix(const Shape& shape, int64_t cols) : rows(shape.rows()), cols(cols) {
        if (cols % GROUP == 0) this->cols *= rows, rows = rows && cols ? 1 : 0;
    }
};

// Blocks in x for a row of `items`, in y for rows, the chip full of both.
dim3 grid2(int64_t items, int64_t rows) {
    const int x = grid(items, THREADS);
    const int64_t most = int64_t{multiprocessors()} * 16 / x, y = rows < most ? rows : most;
    return dim3(x, y < 1 ? 1 : y > 65535 ? 65535 : static_cast<unsigned>(y));
}

template <class Format>
void run_product(Call& call) {
    const Product p(call, Format::TABLE, FLOATS);
    check_present(call, p.x.dtype);
    if (!p.n || !p.rows) return;
    const int n = static_cast<int>(p.n);
    const bool vector = p.cols % 8 == 0 && p.x.aligned() && p.codes.aligned(sizeof(typename Format::Codes));
    const int blocks = grid((p.rows + TILE - 1) / TILE, 1, 64);
    const auto stream = static_cast<cudaStream_t>(call.stream);
#define MC_PRODUCT(N, VECTOR)                                                                                                     \
    product<Format, T, N, VECTOR><<<blocks, WARPS * 32, 0, stream>>>(                                                             \
        p.x.as<T>(), p.codes.as<uint8_t>(), p.scales.as<float>(), p.bias.as<T>(), p.y.as<T>(), n, p.rows, p.cols)
    MC_FOR_FLOAT(p.x.dtype, T, {
        if (!vector)
            MC_PRODUCT(8, false);
        else if (n == 1)
            MC_PRODUCT(1, true);
        else if (n == 2)
            MC_PRODUCT(2, true);
        else if (n <= 4)
            MC_PRODUCT(4, true);
        else
            MC_PRODUCT(8, true);
    })
#undef MC_PRODUCT
}

}  // namespace

MC_KERNEL(quantize_nf4) {
    const Quantize a(call, true);
    check_present(call, a.x.dtype);
    const Matrix m(a.x.shape, a.x.shape.last());
    if (!m.rows || !m.cols) return;
    const bool vector = a.x.aligned() && a.codes.aligned(4) && (m.rows == 1 || m.cols % 8 == 0);
    const int blocks = grid(m.rows * ((m.cols + GROUP - 1) / GROUP), THREADS / 8);
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(a.x.dtype, T, MC_FOR_BOOL(vector, VECTOR,
        quantize4<T, VECTOR><<<blocks, THREADS, 0, stream>>>(a.x.as<T>(), a.codes.as<uint8_t>(), a.scales.as<float>(), m.rows, m.cols)))
}

MC_KERNEL(dequantize_nf4) {
    const Dequantize a(call, true);
    check_present(call, a.y.dtype);
    const Matrix m(a.y.shape, a.y.shape.last());
    if (!m.rows || !m.cols) return;
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(a.y.dtype, T, {
        constexpr int EACH = 16 / sizeof(T);
        if (m.rows == 1 && a.y.aligned() && a.codes.aligned(EACH / 2))
            dequantize4<T><<<grid(m.cols / EACH, THREADS), THREADS, 0, stream>>>(
                a.codes.as<uint8_t>(), a.scales.as<float>(), a.y.as<T>(), m.cols);
        else
            dequantize4_any<T><<<grid2((m.cols + 1) / 2, m.rows), THREADS, 0, stream>>>(
                a.codes.as<uint8_t>(), a.scales.as<float>(), a.y.as<T>(), m.rows, m.cols);
    })
}

MC_KERNEL(product_nf4) { run_product<Nf4>(call); }

MC_KERNEL(quantize_int8) {
    const Quantize a(call, false);
    check_present(call, a.x.dtype);
    const int64_t rows = a.x.shape.rows(), cols = a.x.shape.last();
    if (!rows) return;
    const bool packs = a.x.aligned() && a.codes.aligned(8) && (rows == 1 || cols % 8 == 0);
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(a.x.dtype, T, MC_FOR_BOOL(packs, X,
        quantize8<T, X><<<grid(rows, 1), THREADS, 0, stream>>>(a.x.as<T>(), a.codes.as<int8_t>(), a.scales.as<float>(), rows, cols)))
}

MC_KERNEL(dequantize_int8) {
    const Dequantize a(call, false);
    check_present(call, a.y.dtype);
    const int64_t rows = a.y.shape.rows(), cols = a.y.shape.last();
    if (!rows || !cols) return;
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(a.y.dtype, T, {
        constexpr int EACH = 16 / sizeof(T);
        const auto run = [&](auto kernel, int each) {
            const int64_t strips = (cols / each + THREADS - 1) / THREADS, blocks = strips * ((rows + PAIR - 1) / PAIR);
            if (blocks > INT32_MAX) call.refuse("more than a terabyte of codes");
            kernel<<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(
                a.codes.as<int8_t>(), a.scales.as<float>(), a.y.as<T>(), rows, cols, static_cast<uint32_t>(strips));
        };
        if (a.y.aligned() && a.codes.aligned(EACH) && cols % EACH == 0) run(dequantize8<T, true>, EACH);
        else run(dequantize8<T, false>, 1);
    })
}

MC_KERNEL(product_int8) { run_product<Int8>(call); }
