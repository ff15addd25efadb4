// Hopper's tensor cores by name: a warpgroup, four warps, multiplies 64 rows by 64 columns out of shared memory while its threads go on.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions". Code for sm_90a alone has them.
//
// Warp w of the group and its lanes hold of a sum of 64 x 64 what mma.h says of rows 16 w to 16 w + 15; the same of a left factor in
// registers. What the threads wrote into shared memory, cp.async too, the tensor cores see behind `arrived` and a barrier.
//
// MC_EMULATED: the same on a processor (tests/emulate), but at once.
#pragma once
#include "mma.h"

#define MC_SUM(way, n) way(sums[0][n][0]), way(sums[0][n][1]), way(sums[0][n][2]), way(sums[0][n][3])
#define MC_SUMS_16(way, n) MC_SUM(way, n), MC_SUM(way, n + 1)
#define MC_SUMS_32(way, n) MC_SUMS_16(way, n), MC_SUMS_16(way, n + 2)
#define MC_SUMS_64(way, n) MC_SUMS_32(way, n), MC_SUMS_32(way, n + 4)
#define MC_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MC_NAMES_32 MC_NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MC_NAMES_64 MC_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MC_WGMMA(kind, columns) \
    "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." kind "." kind " {" MC_NAMES_##columns "}, "
// both factors in shared memory, rows by rows; the first of a product does not add
#define MC_WGMMA_SHARED(kind)                                                                                                      \
    asm volatile(MC_WGMMA(kind, 64) "%32, %33, 1, 1, 1, 0, 0;" : MC_SUMS_64("+f", 0) : "l"(left), "l"(right) : "memory")
#define MC_WGMMA_FIRST(kind)                                                                                                       \
    asm volatile(MC_WGMMA(kind, 64) "%32, %33, 0, 1, 1, 0, 0;" : MC_SUMS_64("=f", 0) : "l"(left), "l"(right) : "memory")
// the same, both factors' rows as their depth
#define MC_WGMMA_COLUMNS(kind)                                                                                                     \
    asm volatile(MC_WGMMA(kind, 64) "%32, %33, 1, 1, 1, 1, 1;" : MC_SUMS_64("+f", 0) : "l"(left), "l"(right) : "memory")
// the left factor in registers
#define MC_WGMMA_OWN(kind, way, adds)                                                                                              \
    asm volatile(MC_WGMMA(kind, 64) "{%32, %33, %34, %35}, %36, " adds ", 1, 1, 0;"                                                \
                 : MC_SUMS_64(way, 0)                                                                                              \
                 : "r"(left[k][0]), "r"(left[k][1]), "r"(left[k][2]), "r"(left[k][3]), "l"(right)                                  \
                 : "memory")
// the same, the right one's rows as its depth: so many columns from tile n on; `inputs` number those operands
#define MC_WGMMA_REGISTERS(kind, columns, n, inputs, k)                                                                            \
    asm volatile(MC_WGMMA(kind, columns) inputs ", 1, 1, 1, 1;"                                                                    \
                 : MC_SUMS_##columns("+f", n)                                                                                      \
                 : "r"(left[k][0]), "r"(left[k][1]), "r"(left[k][2]), "r"(left[k][3]), "l"(right)                                  \
                 : "memory")
#define MC_WGMMA_64(kind, n, k) MC_WGMMA_REGISTERS(kind, 64, n, "{%32, %33, %34, %35}, %36", k)
#define MC_WGMMA_PART(kind, k)                                                                                                     \
    if constexpr (PART == 0) MC_WGMMA_64(kind, 0, k);                                                                              \
    else if constexpr (REST == 16) MC_WGMMA_REGISTERS(kind, 16, 8, "{%8, %9, %10, %11}, %12", k);                                  \
    else if constexpr (REST == 32) MC_WGMMA_REGISTERS(kind, 32, 8, "{%16, %17, %18, %19}, %20", k);                                \
    else MC_WGMMA_64(kind, 8, k)

namespace {

// 64 rows of numbers in shared memory, as warpgroups read them for either side of a product. The first 64 of each row are 128 bytes,
// whose 16 bytes number i lie at i xor row modulo 8: eight of a column are then in different banks. The rest of all rows, 16, 32 or 64
// of each, stand behind them, swizzled likewise: what is exchanged are the 16 bytes of a row, according to the row's place in 1024
// bytes (PTX ISA, "Swizzling modes").
template <int CHANNELS>
struct Grouped {
    static constexpr int DIM = CHANNELS, TILES = DIM / 8, REST = DIM - 64, ALIGN = 1024;
    static constexpr bool GROUP = true;
    static_assert(REST == 0 || REST == 16 || REST == 32 || REST == 64);
    static __host__ __device__ constexpr int elements(int rows) { return rows * DIM; }
    // of a part, 64 numbers wide or fewer, where `rows` more lie, eight or a multiple
    static __host__ __device__ constexpr int below(int rows, int channel) { return rows * (channel < 64 ? 64 : REST); }
    static __host__ __device__ constexpr int place(int row, int channel) {
        if (channel < 64) return row * 64 + (channel / 8 ^ row % 8) * 8 + channel % 8;
        constexpr int PACKS = REST ? REST / 8 : 1;
        return 64 * 64 + row * REST + ((channel - 64) / 8 ^ row % 8 * PACKS / 8) * 8 + channel % 8;
    }

    static __device__ __forceinline__ void arrived() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }

    // sums = 64 rows of a by 64 rows of b; there after `finish`. A block is one warpgroup.
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
        const uint32_t own[] = {begins(a), begins(a + 64 * 64)}, other[] = {begins(b), begins(b + 64 * 64)};
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < DIM; k += 16) {
            const uint64_t left = k < 64 ? described<64, T>(own[0] + k * sizeof(T) / 16) : described<REST, T>(own[1] + k % 64 * sizeof(T) / 16);
            const uint64_t right = k < 64 ? described<64, T>(other[0] + k * sizeof(T) / 16) : described<REST, T>(other[1] + k % 64 * sizeof(T) / 16);
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

    // 64 rows of a, each warp its 16, in registers: the left factor of products, which then need shared memory half as often.
    using Rows = uint32_t[DIM / 16][4];
    template <class T>
    static __device__ __forceinline__ void take(Rows& left, const T* a) {
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
            load_matrices<false>(left[k], a + place(threadIdx.x % 128 / 32 * 16 + lane() % 16, 16 * k + lane() / 16 * 8));
    }
    // sums = those rows by 64 rows of b; there after `finish`
    template <class T>
    static __device__ __forceinline__ void rows_by_rows(float (&sums)[1][8][4], const Rows& left, const T* b) {
#ifdef MC_EMULATED
        const int row = lane() / 4 * 4, column = lane() % 4 * 2;
        for (int n = 0; n < 8; n++)
            for (int e = 0; e < 4; e++) sums[0][n][e] = 0.0f;
        for (int k = 0; k < DIM; k += 16) {
            uint32_t all[32][4];
            emulate::exchange(left[k / 16], sizeof left[0], all);
            for (int n = 0; n < 8; n++)
                for (int e = 0; e < 4; e++)
                    for (int i = 0; i < 16; i++)
                        sums[0][n][e] += half_of<T>(all[row + i % 8 / 2][e / 2 + i / 8 * 2], i % 2) *
                                         to_float(b[place(8 * n + column + e % 2, k + i)]);
        }
        __syncwarp();
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
        const uint32_t other[] = {begins(b), begins(b + 64 * 64)};
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            const uint64_t right = k < 4 ? described<64, T>(other[0] + k * sizeof(T)) : described<REST, T>(other[1] + k % 4 * sizeof(T));
            if constexpr (std::is_same_v<T, bf16>) {
                if (k) MC_WGMMA_OWN("bf16", "+f", "1");
                else MC_WGMMA_OWN("bf16", "=f", "0");
            } else {
                if (k) MC_WGMMA_OWN("f16", "+f", "1");
                else MC_WGMMA_OWN("f16", "=f", "0");
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
    }

    // sums += the transpose of 64 x 64 of a times 64 rows of b; there after `finish`
    template <class T>
    static __device__ __forceinline__ void columns_by_rows(float (&sums)[1][8][4], const T* a, const T* b) {
        static_assert(REST == 0);
#ifdef MC_EMULATED
        const int row = threadIdx.x % 128 / 32 * 16 + lane() / 4, column = lane() % 4 * 2;
        for (int n = 0; n < 8; n++)
            for (int e = 0; e < 4; e++)
                for (int k = 0; k < 64; k++)
                    sums[0][n][e] += to_float(a[place(k, row + e / 2 * 8)]) * to_float(b[place(k, 8 * n + column + e % 2)]);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
        begin(sums);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t further = k * below(16, 0) * sizeof(T) / 16;
            const uint64_t left = described<64, T>(begins(a) + further), right = described<64, T>(begins(b) + further);
            if constexpr (std::is_same_v<T, bf16>) MC_WGMMA_COLUMNS("bf16");
            else MC_WGMMA_COLUMNS("f16");
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
    static __device__ __forceinline__ void left_by_rows(float (&sums)[1][TILES][4], const Left& left, const T* b) {
#ifdef MC_EMULATED
        uint32_t all[32][4][4];
        emulate::exchange(left, sizeof left, all);
        for (int n = 0; n < TILES; n++)
            for (int e = 0; e < 4; e++)
                for (int k = 0; k < 64; k++)
                    sums[0][n][e] += half_of<T>(all[lane() / 4 * 4 + k % 8 / 2][k / 16][e / 2 + k % 16 / 8 * 2], k % 2) *
                                     to_float(b[place(k, 8 * n + lane() % 4 * 2 + e % 2)]);
        __syncwarp();
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
        begin(sums);
        left_by_part<0>(sums, left, b);
        if constexpr (REST > 0) left_by_part<1>(sums, left, b);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
    }
    template <class T>
    static __device__ __forceinline__ void weights_by_rows(float (&sums)[1][TILES][4], const float (&weights)[1][8][4], const T* b) {
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
    template <int N>
    static __device__ __forceinline__ void hold(float (&sums)[1][N][4]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma unroll
        for (int n = 0; n < N; n++)
            asm volatile("" : "+f"(sums[0][n][0]), "+f"(sums[0][n][1]), "+f"(sums[0][n][2]), "+f"(sums[0][n][3])::"memory");
#endif
    }
    // What these numbers were no longer counts, as where a product is asked for. Where it is in one branch alone, in the other the
    // compiler must not think that they are kept: it would let no two products be on their way.
    template <int N>
    static __device__ __forceinline__ void forget(float (&sums)[1][N][4]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma unroll
        for (int n = 0; n < N; n++)
            asm volatile("" : "=f"(sums[0][n][0]), "=f"(sums[0][n][1]), "=f"(sums[0][n][2]), "=f"(sums[0][n][3])::"memory");
#endif
    }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    template <int N>
    static __device__ __forceinline__ void begin(float (&sums)[1][N][4]) {
        hold(sums);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    }
    template <int PART, class T>
    static __device__ __forceinline__ void left_by_part(float (&sums)[1][TILES][4], const Left& left, const T* b) {
        const uint32_t other = begins(PART ? b + 64 * 64 : b);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint64_t right = described<PART ? REST : 64, T>(other + k * below(16, PART * 64) * sizeof(T) / 16);
            if constexpr (std::is_same_v<T, bf16>) {
                MC_WGMMA_PART("bf16", k);
            } else {
                MC_WGMMA_PART("f16", k);
            }
        }
    }
    // Where a part begins, in units of 16 bytes; and with it how far groups of eight rows are apart, and which of the swizzles it has, by
    // its width. The halves are put together last: all that is added is added to 32 bits.
    template <class T>
    static __device__ __forceinline__ uint32_t begins(const T* first) {
        return static_cast<uint32_t>(__cvta_generic_to_shared(first)) >> 4 | 1u << 16;
    }
    template <int WIDTH, class T>
    static __device__ __forceinline__ uint64_t described(uint32_t at) {
        constexpr uint32_t KIND = WIDTH == 64 ? 1 : WIDTH == 32 ? 2 : 3, REST_OF_IT = (8 * WIDTH * sizeof(T) >> 4) | KIND << 30;
        uint64_t both;
        asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(at), "r"(REST_OF_IT));
        return both;
    }
#endif
};

// Of the registers of a block's threads a warpgroup keeps so many a thread from here on, or waits until others have given it so many.
template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
__device__ __forceinline__ void more_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

}  // namespace
