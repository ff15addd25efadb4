// Tiles that Hopper's copy engine brings into shared memory while all threads go on, and barriers in shared memory that count who came
// and what bytes arrived. PTX ISA, "cp.async.bulk.tensor" and "mbarrier".
//
// A barrier's phases are counted from 0; `wait_until` waits for the end of the one whose number has that parity. One thread asks for a
// tile; who reads it waits for its barrier, and nothing else is needed: neither a fence nor other threads.
//
// MC_EMULATED: the same on a processor (tests/emulate), where a tile arrives as late as it may.
#pragma once
#include "cuda.h"
#ifdef MC_HOPPER  // there is code for sm_90a
#ifndef MC_EMULATED
#include <cuda.h>
#endif

namespace {

// Of a tensor (rows, heads, dim) of halves: tiles of 64 rows of a head, filled up to 64 channels with zeros, as are rows past the last;
// swizzled as wgmma.h's `Grouped` has its first 64 channels.
#ifdef MC_EMULATED
struct alignas(64) Map {
    const uint16_t* data;
    int64_t rows, heads, dim;
};
#else
using Map = CUtensorMap;
#endif

// Whether the driver knows how.
inline bool describe(Map& map, const void* data, int64_t rows, int64_t heads, int64_t dim) {
#ifdef MC_EMULATED
    map = {static_cast<const uint16_t*>(data), rows, heads, dim};
    return true;
#else
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const Encode encode = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult said = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
        const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &said);
#else
        const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &said);
#endif
        return error == cudaSuccess && said == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
    }();
    const auto heads_ = static_cast<cuuint64_t>(heads), dim_ = static_cast<cuuint64_t>(dim);
    const cuuint64_t sizes[] = {dim_, heads_, static_cast<cuuint64_t>(rows)}, strides[] = {2 * dim_, 2 * heads_ * dim_};
    const cuuint32_t box[] = {64, 1, 64}, each[] = {1, 1, 1};
    return encode && encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(data), sizes, strides, box, each,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
#endif
}

using Barrier = uint64_t;

#ifndef MC_EMULATED
__device__ __forceinline__ uint32_t shared_address(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }
#endif

// by one thread, who then says `begun`, and then comes a barrier of all
__device__ __forceinline__ void begin(Barrier* barrier, int32_t arrivals) {
#if defined(MC_EMULATED)
    emulate::count_begin(barrier, arrivals);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}
__device__ __forceinline__ void begun() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void arrive(Barrier* barrier) {
#if defined(MC_EMULATED)
    emulate::count_arrive(barrier, 0);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}
// arrives, and has the phase wait for so many bytes too
__device__ __forceinline__ void expect(Barrier* barrier, int32_t bytes) {
#if defined(MC_EMULATED)
    emulate::count_arrive(barrier, bytes);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void wait_until(Barrier* barrier, uint32_t parity) {
#if defined(MC_EMULATED)
    emulate::count_wait(barrier, parity);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(
            shared_address(barrier)),
        "r"(parity)
        : "memory");
#endif
}
template <class T>
__device__ __forceinline__ void copy_tile(T* to, const Map& map, Barrier* barrier, int32_t head, int32_t row) {
#if defined(MC_EMULATED)
    emulate::copy_bulk(barrier, 64 * 64 * sizeof(T), [=, &map] {
        for (int r = 0; r < 64; r++)
            for (int c = 0; c < 64; c++) {
                const bool there = c < map.dim && row + r < map.rows;
                const uint16_t bits = there ? map.data[((int64_t{row} + r) * map.heads + head) * map.dim + c] : 0;
                memcpy(to + r * 64 + (c / 8 ^ r % 8) * 8 + c % 8, &bits, sizeof bits);
            }
    });
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(0), "r"(head), "r"(row), "r"(shared_address(barrier))
        : "memory");
#endif
}

// A ring of pairs of tiles: one thread asks for them in turn, all wait for the next, and each lane of READERS warps says
// which it has read: one for its warp is no sooner, and racecheck does not see that it speaks for the others.
template <class T, int STAGES, int READERS>
struct Ring {
    static constexpr int TILE = 64 * 64;
    static constexpr size_t BYTES = STAGES * (2 * TILE * sizeof(T) + 2 * sizeof(Barrier));
    T* tiles;
    Barrier *full, *empty;
    uint32_t asked = 0, used = 0, left = 0;  // so many pairs

    __device__ __forceinline__ Ring(T* place) : tiles(place), full(reinterpret_cast<Barrier*>(place + 2 * STAGES * TILE)), empty(full + STAGES) {}
    __device__ __forceinline__ void begin_all() {  // as `begin`
        for (int i = 0; i < STAGES; i++) begin(full + i, 1), begin(empty + i, READERS * 32);
    }
    __device__ __forceinline__ void ask(const Map& one, const Map& other, int32_t head, int32_t row) {
        const uint32_t stage = asked % STAGES, round = asked / STAGES;
        if (round) wait_until(empty + stage, (round - 1) % 2);
        T* const to = tiles + 2 * stage * TILE;
        expect(full + stage, 2 * sizeof(T) * TILE);
        copy_tile(to, one, full + stage, head, row);
        copy_tile(to + TILE, other, full + stage, head, row);
        asked++;
    }
    __device__ __forceinline__ T* next() {  // the first of the next pair; the other one lies behind it
        const uint32_t stage = used % STAGES, round = used / STAGES;
        wait_until(full + stage, round % 2);
        used++;
        return tiles + 2 * stage * TILE;
    }
    __device__ __forceinline__ T* last() const { return tiles + 2 * ((used - 1) % STAGES) * TILE; }
    __device__ __forceinline__ void leave() {  // the first of those used and not left: its place may be written
        arrive(empty + left % STAGES);
        left++;
    }
};

}  // namespace
#endif
