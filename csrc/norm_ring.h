// Rows that pass through shared memory: for the backward of the norms, and for their forward where rows are not aligned.
//
// As many blocks as fit walk over the rows, so that the weights and the sums for their gradients stay in registers for good. A group of
// warps takes ROWS rows at a time, a thread PACKS packs of each, and a barrier and a reduction serve all of these rows; rows to come
// are on their way into shared memory meanwhile (cp.async).
//
// Memory moves in aligned packs of eight elements even where rows of half precision are not aligned (SHIFT): a thread's columns are
// those of aligned packs of the result, an input is read in its own aligned packs, and a thread takes its columns from two of them. Which columns
// these are depends on the row's number modulo 8 at most, and a group takes rows for which it is the same.
#pragma once
#include "norm_rows.h"

namespace {

constexpr int THREADS = 640;  // of a block, at most, with 96 registers each
constexpr int threads_of(int packs) { return packs > 2 ? 512 : THREADS; }  // with 128, for the sums of more columns
constexpr int STAGES = 4;     // of the ring, at most
constexpr int FEW_PACKS = 2;  // of a thread, at most, where a block has several groups

// For each row to come there is a slot of 16 bytes, or two of fp32, for each pack of eight.

// The memory of a group: slot after slot, in each a pack for every PACKS of every thread.
template <int PACKS>
struct Ring {
    uint4* base;
    __device__ __forceinline__ int packs() const { return PACKS * static_cast<int>(blockDim.x); }
    __device__ __forceinline__ static int pack(int j) { return static_cast<int>(threadIdx.x + j * blockDim.x); }
    __device__ __forceinline__ uint4* at(int slot, int j) const { return base + slot * packs() + pack(j); }
};

// An input whose rows pass through the ring.
template <int D, bool SHIFT, int PACKS, int GAP>
struct Source {
    Tensor from;
    int64_t end;      // elements
    int skew, shift;  // of its own packs before the row; how many elements behind one the thread's columns begin
    __device__ __forceinline__ Source(const Tensor& from, int64_t end, int64_t start, int window)
        : from(from), end(end), skew(0), shift(0) {
        if (!SHIFT) return;
        skew = from.skew(start);
        if (skew < window) skew += 8;
        shift = skew - window;
    }
    __device__ __forceinline__ int slots() const { return size<D>(from) / 2; }
    __device__ __forceinline__ int first(int j) const { return column_of<GAP>(Ring<PACKS>::pack(j)) - skew; }
    __device__ __forceinline__ bool copies(int j, int dim) const { return first(j) < dim && (!SHIFT || first(j) + 8 > 0); }
    // whether the second of two fours is there, where the first is
    __device__ __forceinline__ bool second(int j, int dim) const { return GAP == 4 || first(j) + GAP < dim; }
    // Zeros where no copy writes.
    __device__ __forceinline__ void clear(const Ring<PACKS>& ring, int slot, int dim) const {
#pragma unroll
        for (int j = 0; j < PACKS; j++)
            for (int i = 0; i < 2 * slots(); i++)
                if (!copies(j, dim) || (i >= slots() && !second(j, dim)))
                    reinterpret_cast<uint2*>(ring.at(slot + i / 2, j))[i % 2] = make_uint2(0, 0);
    }
    // The row that begins at element `at`, or zeros where there is none.
    __device__ __forceinline__ void copy(const Ring<PACKS>& ring, int slot, int64_t at, int dim, bool exists) const {
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            if (!copies(j, dim)) continue;
            const int64_t start = exists ? at + first(j) : 0;
            const char* place = static_cast<const char*>(from.data) + start * size<D>(from);
            if (SHIFT && exists && start + 8 > end) {  // the array ends within this pack, and perhaps the memory that may be read
                part(ring.at(slot, j), place, static_cast<int>(end - start));
                continue;
            }
            if (GAP > 4 && kind<D>(from) != F32) {
                auto* to = reinterpret_cast<uint2*>(ring.at(slot, j));
                copy_async(to, place, exists);
                if (second(j, dim)) copy_async(to + 1, place + (exists ? 2 * GAP : 0), exists);
                continue;
            }
            copy_async(ring.at(slot, j), place, exists);
            if (kind<D>(from) == F32 && second(j, dim)) copy_async(ring.at(slot + 1, j), place + (exists ? 4 * GAP : 0), exists);
        }
    }
    // so many elements, and zeros
    __device__ __forceinline__ void part(uint4* to, const char* place, int count) const {
        for (int i = 0; i < 8; i++)
            reinterpret_cast<uint16_t*>(to)[i] = i < count ? reinterpret_cast<const uint16_t*>(place)[i] : 0;
    }
    __device__ __forceinline__ Eight get(const Ring<PACKS>& ring, int slot, int j, uint32_t valid) const {
        Eight to;
        if (kind<D>(from) == F32) {
            uint32_t words[8];
            read(words, ring.at(slot, j)), read(words + 4, ring.at(slot + 1, j));
            to = decode(words, F32);
        } else {
            uint32_t words[SHIFT ? 8 : 4];
            read(words, ring.at(slot, j));
            if (SHIFT && shift) {
                const int next = Ring<PACKS>::pack(j) + 1 < ring.packs() ? 1 : 0;
                read(words + 4 % (SHIFT ? 8 : 4), ring.at(slot, j) + next);
                behind<2>(words, shift);
            }
            to = decode<4>({words[0], words[1], words[2], words[3]}, kind<D>(from));
        }
        if (SHIFT && valid != 0xFF)
#pragma unroll
            for (int k = 0; k < 8; k++) to.at[k] = valid >> k & 1 ? to.at[k] : 0.0f;
        return to;
    }
    static __device__ __forceinline__ void read(uint32_t* to, const uint4* from) {
        const uint4 found = *from;
        to[0] = found.x, to[1] = found.y, to[2] = found.z, to[3] = found.w;
    }
};

// f(row, at, slot) for the first of every ROWS rows of this group, which are p.groups apart, and the element that it begins at;
// copy(at, slot, exists) has started what brings one. All groups of a block go as often as its first one, so that they have met at
// equally many barriers when they do something together: compute-sanitizer's racecheck counts them. SINGLE: it is the only one.
template <int ROWS, bool SHIFT, bool SINGLE, class Copy, class F>
__device__ __forceinline__ void walk(const Problem& p, int64_t group, int slots, Copy copy, F f) {
    const int behind = SINGLE ? 0 : static_cast<int>(threadIdx.y);
    const int64_t step = p.groups * ROWS, apart = p.groups * p.dim;
    int64_t next = group, ahead = group * p.dim;
    const auto bring = [&](int stage) {
        if (next - behind < p.rows)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                copy(ahead + r * apart, (stage * ROWS + r) * slots, (ROWS == 1 && SINGLE) || next + r * p.groups < p.rows);
        next += step, ahead += ROWS * apart;
        commit();
    };
    for (int i = 0; i + 1 < p.stages; i++) bring(i);
    int stage = 0;
    int64_t at = group * p.dim;
#pragma unroll 1
    for (int64_t row = group; row - behind < p.rows; row += step, at += ROWS * apart) {
        wait(p.stages - 2);
        if (SHIFT) group_barrier<true>();  // what neighbours have copied; and they have done with what is overwritten next
        bring(stage ? stage - 1 : p.stages - 1);
        f(row, at, stage * ROWS * slots);
        if (++stage == p.stages) stage = 0;
    }
    wait(0);
}

// ---- launching

int32_t attribute(cudaDeviceAttr which) {
    int32_t device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, which, device);
    return value;
}

// After how many rows their alignment repeats.
int period(int64_t dim) { return dim % 8 == 0 ? 1 : dim % 4 == 0 ? 2 : dim % 2 == 0 ? 4 : 8; }

// Runs a kernel on groups of threads, several for a block where rows are short; false where its ring does not fit. `slots` of 16
// bytes hold a pack of a row; `joint`: groups need not be whole warps; `lines`: how many groups there may be, and then how many blocks
// there were.
template <auto KERNEL>
bool launch(int packs, int rows, Problem p, bool shift, bool joint, int slots, int64_t& lines, cudaStream_t stream) {
    const int64_t columns = (p.dim + (shift ? 22 : 7)) / 8;
    int64_t threads = ((columns + packs - 1) / packs + 31) / 32 * 32;
    if (threads > threads_of(packs)) return false;
    static const int registers = [] {  // of this kernel, on any chip
        cudaFuncAttributes found{};
        cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(KERNEL));
        return found.numRegs > 0 ? (found.numRegs + 7) / 8 * 8 : 96;
    }();
    int groups = threads < 512 && packs <= FEW_PACKS ? min(static_cast<int>(512 / threads), 15) : 1;  // each has a barrier of its own, of fifteen
    if (joint) {  // three instead of two; where there are more of whole warps, those are faster by 2 to 10 %
        threads = (columns + 7) / 8 * 8;
        if (groups != 2 || 3 * threads > THREADS) return false;
        groups = 3;
    }
    groups = static_cast<int>(min(int64_t{groups}, lines));
    while (shift && groups & (groups - 1)) groups--;
    const int block = (static_cast<int>(threads) * groups + 31) / 32 * 32;
    int resident = 65536 / (registers * block);
    const int32_t each = 16 * slots * packs * rows * static_cast<int>(threads) * groups;  // bytes of a stage
    const int32_t whole = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    const int32_t most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 4096;
    int32_t fit = 0;
    for (; resident; resident--) {
        fit = min(most, whole / resident - 6144);
        if (fit >= 2 * each) break;
    }
    if (!resident) return false;
    p.stages = min(fit / each, STAGES);
    const int64_t unit = shift ? max(period(p.dim) / groups, 1) : 1;  // blocks: a group keeps to rows of one alignment
    const int64_t wanted = max(grid(p.rows, groups * rows, resident) / unit, int64_t{1});
    const int64_t blocks = min(wanted, lines / (unit * groups)) * unit;
    if (!blocks) return false;
    p.groups = blocks * groups, lines = blocks;
    const int32_t bytes = each * p.stages;
    const auto kernel = reinterpret_cast<const void*>(KERNEL);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
    KERNEL<<<static_cast<unsigned>(blocks), dim3(static_cast<unsigned>(threads), groups), bytes, stream>>>(p);
    return true;
}

}  // namespace
