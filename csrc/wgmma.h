// Hopper's tensor cores by name: a warpgroup, four warps, multiplies 64 rows by 64 columns out of shared memory while its threads go on.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions". Code for sm_90a alone has them.
//
// Warp w of the group and its lanes hold of a sum of 64 x 64 what mma.h says of rows 16 w to 16 w + 15; the same of a left factor in
// registers. What the threads wrote into shared memory, cp.async too, the tensor cores see behind `arrived` and a barrier.
//
// MC_EMULATED: the same on a processor (tests/emulate), but at once.
#pragma once
#include "mma.h"

#define MC_WGMMA_SUMS(way)                                                                                                         \
    way(sums[0][0][0]), way(sums[0][0][1]), way(sums[0][0][2]), way(sums[0][0][3]), way(sums[0][1][0]), way(sums[0][1][1]),        \
        way(sums[0][1][2]), way(sums[0][1][3]), way(sums[0][2][0]), way(sums[0][2][1]), way(sums[0][2][2]),                        \
        way(sums[0][2][3]), way(sums[0][3][0]), way(sums[0][3][1]), way(sums[0][3][2]), way(sums[0][3][3]),                        \
        way(sums[0][4][0]), way(sums[0][4][1]), way(sums[0][4][2]), way(sums[0][4][3]), way(sums[0][5][0]),                        \
        way(sums[0][5][1]), way(sums[0][5][2]), way(sums[0][5][3]), way(sums[0][6][0]), way(sums[0][6][1]),                        \
        way(sums[0][6][2]), way(sums[0][6][3]), way(sums[0][7][0]), way(sums[0][7][1]), way(sums[0][7][2]),                        \
        way(sums[0][7][3])
#define MC_WGMMA(kind)                                                                                                             \
    "wgmma.mma_async.sync.aligned.m64n64k16.f32." kind "." kind                                                                    \
    " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "   \
    "%26, %27, %28, %29, %30, %31}, "
// both factors in shared memory, rows by rows; the first of a product does not add
#define MC_WGMMA_SHARED(kind)                                                                                                      \
    asm volatile(MC_WGMMA(kind) "%32, %33, 1, 1, 1, 0, 0;" : MC_WGMMA_SUMS("+f") : "l"(left), "l"(right) : "memory")
#define MC_WGMMA_FIRST(kind)                                                                                                       \
    asm volatile(MC_WGMMA(kind) "%32, %33, 0, 1, 1, 0, 0;" : MC_WGMMA_SUMS("=f") : "l"(left), "l"(right) : "memory")
// the left factor in registers, the right one's rows as its depth
#define MC_WGMMA_REGISTERS(kind, k)                                                                                                \
    asm volatile(MC_WGMMA(kind) "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"                                                           \
                 : MC_WGMMA_SUMS("+f")                                                                                             \
                 : "r"(left[k][0]), "r"(left[k][1]), "r"(left[k][2]), "r"(left[k][3]), "l"(right)                                  \
                 : "memory")

namespace {

// Rows of 64 numbers, 128 bytes, whose 16 bytes number i lie at i xor row modulo 8: eight of a column are then in different banks.
struct Swizzled {
    static constexpr int DIM = 64, TILES = DIM / 8, ALIGN = 1024;
    static __host__ __device__ constexpr int elements(int rows) { return rows * DIM; }
    static __host__ __device__ constexpr int place(int row, int channel) { return row * DIM + ((channel / 8 ^ row % 8) * 8 + channel % 8); }

    static __device__ __forceinline__ void arrived() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }

    // sums = 64 rows of a, of 64 numbers, by 64 rows of b; there after `finish`. A block is one warpgroup.
    template <class T>
    static __device__ __forceinline__ void rows_by_rows(float (&sums)[1][8][4], const T* a, const T* b) {
#ifdef MC_EMULATED
        const int row = threadIdx.x % 128 / 32 * 16 + lane() / 4, column = lane() % 4 * 2;
        for (int n = 0; n < 8; n++)
            for (int e = 0; e < 4; e++) {
                sums[0][n][e] = 0.0f;
                for (int k = 0; k < DIM; k++)
                    sums[0][n][e] += to_float(a[place(row + e / 2 * 8, k)]) * to_float(b[place(8 * n + column + e % 2, k)]);
            }
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
        const uint64_t own = described(a), other = described(b);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < DIM; k += 16) {
            const uint64_t left = own + k * sizeof(T) / 16, right = other + k * sizeof(T) / 16;
            if constexpr (std::is_same_v<T, bf16>) {
                if (k) MC_WGMMA_SHARED("bf16");
                else MC_WGMMA_FIRST("bf16");
            } else {
                if (k) MC_WGMMA_SHARED("f16");
                else MC_WGMMA_FIRST("f16");
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
    }

    // Weights, 64 x 64 a warpgroup as a product left them, rounded: the left factor of a product.
    using Left = uint32_t[4][4];
    template <class T>
    static __device__ __forceinline__ void round(Left& left, const float (&weights)[1][8][4]) {
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                left[k][i] = pack2<T>(weights[0][2 * k + i / 2][i % 2 * 2], weights[0][2 * k + i / 2][i % 2 * 2 + 1]);
    }

    // sums += left times 64 rows of b; there after `finish`
    template <class T>
    static __device__ __forceinline__ void left_by_rows(float (&sums)[1][8][4], const Left& left, const T* b) {
#ifdef MC_EMULATED
        uint32_t all[32][4][4];
        emulate::exchange(left, sizeof left, all);
        for (int n = 0; n < 8; n++)
            for (int e = 0; e < 4; e++)
                for (int k = 0; k < 64; k++)
                    sums[0][n][e] += half_of<T>(all[lane() / 4 * 4 + k % 8 / 2][k / 16][e / 2 + k % 16 / 8 * 2], k % 2) *
                                     to_float(b[place(k, 8 * n + lane() % 4 * 2 + e % 2)]);
        __syncwarp();
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
        const uint64_t other = described(b);
        begin(sums);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint64_t right = other + k * elements(16) * sizeof(T) / 16;
            if constexpr (std::is_same_v<T, bf16>) MC_WGMMA_REGISTERS("bf16", k);
            else MC_WGMMA_REGISTERS("f16", k);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
    }
    template <class T>
    static __device__ __forceinline__ void weights_by_rows(float (&sums)[1][8][4], const float (&weights)[1][8][4], const T* b) {
        Left left;
        round<T>(left, weights);
        left_by_rows<T>(sums, left, b);
    }

    // until no more than NEWER groups of products are on their way: these sums are there
    template <int NEWER, class... F>
    static __device__ __forceinline__ void finish_but(F&... sums) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWER) : "memory");
        (hold(sums), ...);
#endif
    }
    template <class... F>
    static __device__ __forceinline__ void finish(F&... sums) {
        finish_but<0>(sums...);
    }

    // The compiler moves nothing that uses these numbers across this.
    static __device__ __forceinline__ void hold(float (&sums)[1][8][4]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma unroll
        for (int n = 0; n < 8; n++)
            asm volatile("" : "+f"(sums[0][n][0]), "+f"(sums[0][n][1]), "+f"(sums[0][n][2]), "+f"(sums[0][n][3])::"memory");
#endif
    }
    // What these numbers were no longer counts, as where a product is asked for. Where it is in one branch alone, in the other the
    // compiler must not think that they are kept: it would let no two products be on their way.
    static __device__ __forceinline__ void forget(float (&sums)[1][8][4]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma unroll
        for (int n = 0; n < 8; n++)
            asm volatile("" : "=f"(sums[0][n][0]), "=f"(sums[0][n][1]), "=f"(sums[0][n][2]), "=f"(sums[0][n][3])::"memory");
#endif
    }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static __device__ __forceinline__ void begin(float (&sums)[1][8][4]) {
        hold(sums);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    }
    // Where a matrix begins, how its rows lie: groups of eight 1024 bytes apart, 128 bytes wide, swizzled.
    template <class T>
    static __device__ __forceinline__ uint64_t described(const T* first) {
        const uint64_t at = static_cast<uint32_t>(__cvta_generic_to_shared(first));
        return at >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
    }
#endif
};

}  // namespace
