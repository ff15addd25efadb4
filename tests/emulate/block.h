// The threads of a block: where they are, what they wait for, what they share.
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>

#include "vector.h"

namespace emulate {

constexpr uint32_t WHOLE = 0xFFFFFFFFu;  // all lanes of a warp

// Runs `thread` for every thread of every block; throws std::runtime_error where they wait for what cannot come.
void run(dim3 grid, dim3 block, size_t shared, const std::function<void()>& thread);

// In which order blocks, and threads that wait for nothing, run: 0 rising, 1 falling, another number: drawn anew at every turn,
// seeded by it. A kernel whose threads are synchronised as they must be computes the same bits in all of them.
extern "C" __attribute__((visibility("default"))) void emulate_order(int order);

// ---- to be called by threads; `file` and `line` are the caller's

void barrier(int number, int threads, const char* file = __builtin_FILE(), int line = __builtin_LINE());
void exchange(const void* mine, int bytes, void* all, const char* file = __builtin_FILE(), int line = __builtin_LINE());

// cp.async, which may write at once or as late as when it is waited for: in order 1 at once, otherwise late.
void copy_async(void* to, const void* from, int bytes, int given);
void commit_async();
void wait_async(int newer);

// mbarriers, by their place; `bytes` are expected besides with the arrival. A copy of so many bytes comes when nobody can go on without
// it, in order 1 at once.
void count_begin(const void* barrier, int arrivals);
void count_arrive(const void* barrier, int bytes, const char* file = __builtin_FILE(), int line = __builtin_LINE());
void count_wait(const void* barrier, uint32_t parity, const char* file = __builtin_FILE(), int line = __builtin_LINE());
void copy_bulk(const void* barrier, int bytes, std::function<void()> copy);

void* dynamic_memory();
void fresh(void* place, size_t bytes);  // of this block's shared memory: nothing is in it yet
template <class T>
T* dynamic() {
    return static_cast<T*>(dynamic_memory());
}
template <class T>
void fresh(T& variable) {
    fresh(&variable, sizeof variable);
}

}  // namespace emulate

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emulate::barrier(0, static_cast<int>(blockDim.count()), file, line);
}

// ---- what lanes tell each other

namespace emulate {

struct Said {
    alignas(16) char lane[32][64];
    template <class T>
    T of(int i) const {
        T value;
        std::memcpy(&value, lane[i & 31], sizeof value);
        return value;
    }
};

// What each of some lanes of a warp gives; to be read before the next call.
const Said& exchange(const void* mine, int bytes, uint32_t lanes, const char* file, int line);

inline uint32_t lane() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32; }

}  // namespace emulate

inline void __syncwarp(uint32_t lanes = emulate::WHOLE, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emulate::exchange(nullptr, 0, lanes, file, line);
}
template <class T>
T __shfl_sync(uint32_t lanes, T mine, int from, int width = 32, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    const uint32_t part = width - 1;
    return emulate::exchange(&mine, sizeof mine, lanes, file, line).template of<T>((emulate::lane() & ~part) | (from & part));
}
template <class T>
T __shfl_xor_sync(uint32_t lanes, T mine, int hop, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return emulate::exchange(&mine, sizeof mine, lanes, file, line).template of<T>(emulate::lane() ^ hop);
}
inline uint32_t __ballot_sync(uint32_t lanes, bool mine, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    const emulate::Said& said = emulate::exchange(&mine, 1, lanes, file, line);
    uint32_t found = 0;
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) found |= uint32_t{said.of<bool>(i)} << i;
    return found;
}
inline bool __any_sync(uint32_t lanes, bool mine, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return __ballot_sync(lanes, mine, file, line) != 0;
}
// Threads run one at a time, and stop nowhere within one of these.
template <class T, class U>
T atomicAdd(T* at, U more) {
    const T before = *at;
    *at = before + static_cast<T>(more);
    return before;
}
inline void __threadfence() {}
