// Tensor cores and the way of their operands, by name: matrices of 8 x 8 out of shared memory, products of 16 x 8 x 16, and of those
// the products of whole tiles. PTX ISA, "Matrix multiply-accumulate operations using mma instruction".
//
// Lane 4 g + c of a warp holds, of
//   the left factor, 16 x 16:    rows g, g + 8, g, g + 8 in columns 2c, 2c, 2c + 8, 2c + 8, and the column after each
//   the right factor, 16 x 8:    column g in rows 2c and 2c + 8, and the row after each
//   the sum, 16 x 8:             row g in columns 2c, 2c + 1; row g + 8 in the same
// so two sums side by side, rounded, are the left factor of a next product: what softmax makes of scores needs no shared memory.
//
// MC_EMULATED: the same on a processor (tests/emulate), element by element as PTX's tables place them.
#pragma once
#include "cuda.h"
#include "ptx.h"

namespace {

#ifdef MC_EMULATED
template <class T>
uint32_t bits_of(T x) {
    uint16_t bits;
    static_assert(sizeof x == sizeof bits);
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
template <class T>
float half_of(uint32_t both, int which) {
    const auto bits = static_cast<uint16_t>(both >> 16 * which);
    T x;
    memcpy(&x, &bits, sizeof x);
    return to_float(x);
}
#endif

// Four matrices of 8 x 8; lane 8 i + r points to the 16 bytes of row r of matrix i. A lane gets two of row lane / 4, or TURNED of
// column lane / 4, of each.
template <bool TURNED>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
#ifdef MC_EMULATED
    const uint16_t* rows[32];
    emulate::exchange(&row, sizeof row, rows);
    for (int i = 0; i < 4; i++) {
        const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4 * 2;
        if (reinterpret_cast<uintptr_t>(rows[8 * i + r]) % 16) __builtin_trap();  // as a GPU does
        to[i] = TURNED ? rows[8 * i + c][r] | uint32_t{rows[8 * i + c + 1][r]} << 16
                       : rows[8 * i + r][c] | uint32_t{rows[8 * i + r][c + 1]} << 16;
    }
    __syncwarp();  // what all have read may be written again
#else
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    if (TURNED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(shared));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(shared));
#endif
}

// The other way round, not turned; sm_90 and later.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&from)[4]) {
#ifdef MC_EMULATED
    char* rows[32];
    emulate::exchange(&row, sizeof row, rows);
    for (int i = 0; i < 4; i++) {
        if (reinterpret_cast<uintptr_t>(rows[8 * i]) % 16) __builtin_trap();
        memcpy(rows[8 * i + threadIdx.x % 32 / 4] + threadIdx.x % 4 * 4, &from[i], 4);
    }
    __syncwarp();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(row))),
                 "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
#endif
}

// sum += left * right. Turing has fp16 alone, and half as deep.
template <class T>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0, uint32_t right1) {
#ifdef MC_EMULATED
    const uint32_t mine[6] = {left[0], left[1], left[2], left[3], right0, right1};
    uint32_t all[32][6];
    emulate::exchange(mine, sizeof mine, all);
    for (int e = 0; e < 4; e++) {
        const int row = threadIdx.x % 32 / 4 + e / 2 * 8, column = threadIdx.x % 4 * 2 + e % 2;
        for (int k = 0; k < 16; k++)
            sum[e] += half_of<T>(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
                      half_of<T>(all[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    }
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (std::is_same_v<T, bf16>)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
#else
    static_assert(std::is_same_v<T, fp16>, "no chip before sm_80 multiplies bf16");
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(left[0]), "r"(left[1]), "r"(right0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(left[2]), "r"(left[3]), "r"(right1));
#endif
}

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }

// ---- of those, products of tiles in shared memory. Rows of DIM numbers, 8 more than a multiple of 16 apart: eight rows of a matrix
// then lie in different banks.
template <int CHANNELS>
struct Padded {
    static constexpr int DIM = CHANNELS, TILES = DIM / 8, STRIDE = DIM + 8, ALIGN = 16;
    static constexpr bool GROUP = false;
    static __host__ __device__ constexpr int elements(int rows) { return rows * STRIDE; }
    static __host__ __device__ constexpr int below(int rows, int) { return rows * STRIDE; }
    static __host__ __device__ constexpr int place(int row, int channel) { return row * STRIDE + channel; }
    static __device__ __forceinline__ void arrived() {}

    // sums = rows of a (16 M a warp) by 8 N rows of b; there after `finish`
    template <class T, int M, int N>
    static __device__ __forceinline__ void rows_by_rows(float (&sums)[M][N][4], const T* a, const T* b) {
        static_assert(N % 2 == 0 && DIM % 16 == 0);
        const T* from_a = a + (static_cast<int>(threadIdx.x) / 32 * 16 * M + lane() % 16) * STRIDE + lane() / 16 * 8;
        const T* from_b = b + (lane() % 8 + lane() / 16 * 8) * STRIDE + lane() / 8 % 2 * 8;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[m][n][e] = 0.0f;
#pragma unroll
        for (int d = 0; d < DIM; d += 16) {
            uint32_t left[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) load_matrices<false>(left[m], from_a + m * 16 * STRIDE + d);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t right[4];
                load_matrices<false>(right, from_b + n * 8 * STRIDE + d);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    multiply<T>(sums[m][n], left[m], right[0], right[1]);
                    multiply<T>(sums[m][n + 1], left[m], right[2], right[3]);
                }
            }
        }
    }

    // sums += weights (16 M x 8 K a warp, as a product left them) times 8 K rows of b; there after `finish`
    template <class T, int M, int K>
    static __device__ __forceinline__ void weights_by_rows(float (&sums)[M][TILES][4], const float (&weights)[M][K][4], const T* b) {
        static_assert(TILES % 2 == 0 && K % 2 == 0);
        const T* from_b = b + lane() % 16 * STRIDE + lane() / 16 * 8;
#pragma unroll
        for (int k = 0; k < K; k += 2) {
            uint32_t left[M][4];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    left[m][i] = pack2<T>(weights[m][k + i / 2][i % 2 * 2], weights[m][k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < TILES; n += 2) {
                uint32_t right[4];
                load_matrices<true>(right, from_b + k * 8 * STRIDE + n * 8);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    multiply<T>(sums[m][n], left[m], right[0], right[1]);
                    multiply<T>(sums[m][n + 1], left[m], right[2], right[3]);
                }
            }
        }
    }

    // until all products are there, as they always are
    template <class... F>
    static __device__ __forceinline__ void finish(F&...) {}
};

}  // namespace
