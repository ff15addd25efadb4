// What the CUDA kernels share: 16-byte packs of elements, conversions, reductions within a block, the size of a grid.
#pragma once
#include <cuda_runtime.h>

#include <type_traits>

#include "half.h"
#include "kernel.h"

namespace {

// What a thread moves at once, so that neighbours' lie side by side: where each had 32 bytes in a row, as two such packs of fp32, what a
// warp writes would be every other half of the same sectors, and takes twice as long.
template <class T>
constexpr int SPAN = 16 / sizeof(T);

// N elements of one thread.
template <class T, int N = 8>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T at[N];
};

// A pack's numbers, and numbers rounded to a pack: by words, since a compiler takes long over elements of 16 bits.
template <class T, int N>
__device__ __forceinline__ void spread(const Pack<T, N>& pack, float (&to)[N]) {
    if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
        const auto* words = reinterpret_cast<const uint32_t*>(&pack);
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            to[2 * i] = __uint_as_float(words[i] << 16);
            to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = to_float(pack.at[i]);
    }
}
template <class T, int N>
__device__ __forceinline__ Pack<T, N> rounded(const float (&from)[N]) {
    Pack<T, N> pack;
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) reinterpret_cast<uint32_t*>(&pack)[i] = pack2<T>(from[2 * i], from[2 * i + 1]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) pack.at[i] = from_float<T>(from[i]);
    }
    return pack;
}

// What moves a pack, in one step or in several.
template <class P>
using WordOf = std::conditional_t<sizeof(P) % 16 == 0, uint4, std::conditional_t<sizeof(P) % 8 == 0, uint2, uint32_t>>;

// VECTOR: `p` is aligned as packs are and whole packs are moved at once; the rest, and misaligned arrays, go element by element.
template <bool VECTOR, int N = 8, class T>
__device__ __forceinline__ Pack<T, N> load(const T* p, int count = N) {
    using Word = WordOf<Pack<T, N>>;
    Pack<T, N> pack;
    if (VECTOR && count == N) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(Word)); i++)
            reinterpret_cast<Word*>(&pack)[i] = reinterpret_cast<const Word*>(p)[i];
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) pack.at[i] = i < count ? p[i] : from_float<T>(0.0f);
    }
    return pack;
}
template <bool VECTOR, class T, int N>
__device__ __forceinline__ void store(T* p, const Pack<T, N>& pack, int count = N) {
    using Word = WordOf<Pack<T, N>>;
    if (VECTOR && count == N) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(Word)); i++)
            __stwb(reinterpret_cast<Word*>(p) + i, reinterpret_cast<const Word*>(&pack)[i]);  // or nvcc may write it in parts
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < count) p[i] = pack.at[i];
    }
}
template <bool VECTOR, class T>
__device__ __forceinline__ Pack<T> load8(const T* p, int count = 8) {
    return load<VECTOR, 8>(p, count);
}
template <bool VECTOR, class T>
__device__ __forceinline__ void store8(T* p, const Pack<T>& pack, int count = 8) {
    store<VECTOR>(p, pack, count);
}
// How many of N elements from `at` on there are, of `count`; WHOLE: all or none.
template <int N, bool WHOLE = false>
__device__ __forceinline__ int some(int64_t at, int64_t count) {
    if (WHOLE) return at < count ? N : 0;
    return at + N <= count ? N : at < count ? static_cast<int>(count - at) : 0;
}

// The elements, of SIZE bytes, from `shift` on of two packs.
template <int SIZE, int WORDS>
__device__ __forceinline__ void behind(uint32_t (&words)[WORDS], int shift) {
    if (SIZE == 1 && shift & 8)
#pragma unroll
        for (int i = 0; i + 2 < WORDS; i++) words[i] = words[i + 2];
    if (shift & 4)
#pragma unroll
        for (int i = 0; i + SIZE < WORDS; i++) words[i] = words[i + SIZE];
    if (SIZE > 1 && shift & 2)
#pragma unroll
        for (int i = 0; i + SIZE / 2 < WORDS; i++) words[i] = words[i + SIZE / 2];
    if (SIZE > 1 ? shift & 1 : shift & 3)
#pragma unroll
        for (int i = 0; i < WORDS / 2; i++)
            words[i] = SIZE == 4 ? words[i + 1] : __funnelshift_r(words[i], words[i + 1], SIZE == 2 ? 16 : shift % 4 * 8);
}

// A thread's N elements from `at` on, of an array of `count`. WHOLE: a block has found that its are all there and all arrays are
// aligned; asking before each pack would have one wait for the next. Otherwise at once where this array allows it, else one by one
// from the lines of the first cache.
template <bool WHOLE, int N = 8, class T>
__device__ __forceinline__ Pack<T, N> take(const T* p, int64_t at, int64_t count) {
    if (WHOLE) return load<true, N>(p + at);
    if (at + N > count) return load<false, N>(p + at, some<N>(at, count));
    return reinterpret_cast<uintptr_t>(p) % 16 ? load<false, N>(p + at) : load<true, N>(p + at);
}
template <bool WHOLE, class T, int N>
__device__ __forceinline__ void put(T* p, const Pack<T, N>& pack, int64_t at, int64_t count) {
    if (WHOLE) return store<true>(p + at, pack);
    if (at + N > count) return store<false>(p + at, pack, some<N>(at, count));
    reinterpret_cast<uintptr_t>(p) % 16 ? store<false>(p + at, pack) : store<true>(p + at, pack);
}
// Calls f with std::true_type, for WHOLE, where a block's elements end by `count` and no pointer (or null) is misaligned.
template <class F, class... T>
__device__ __forceinline__ void whole_or_not(int64_t end, int64_t count, F f, const T*... arrays) {
    if (end <= count && ((reinterpret_cast<uintptr_t>(arrays) % 16 == 0) && ...)) f(std::true_type{});
    else f(std::false_type{});
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lane);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, lane));
    return x;
}

// A sum in an order that is given, with what each addition has rounded off: as exact as one rounding (Knuth, "The Art of Computer
// Programming", volume 2, 4.2.2, theorem B).
struct Total {
    float sum = 0.0f, rest = 0.0f;
    __device__ __forceinline__ void add(float x, float its_rest = 0.0f) {
        const float next = sum + x, added = next - sum;
        rest += (sum - (next - added)) + (x - added) + its_rest;
        sum = next;
    }
    __device__ __forceinline__ float whole() const { return rest - rest == 0.0f ? sum + rest : sum; }  // beside an infinity there is none
};

// put(c, sum) for 32 of `width` columns, from the first on: of `count` lines, each of 16 groups of threads adds its own in their order,
// then the groups' sums are added in theirs. Blocks are 32 x 16 threads, all of which must call it, once.
template <class Put>
__device__ __forceinline__ void add_lines(const float* lines, int64_t count, int64_t width, int64_t first, const Put& put) {
    __shared__ float sums[16][33], rests[16][33];
    const int64_t c = first + threadIdx.x;
    Total total;
    if (c < width) {
#pragma unroll 8
        for (int64_t i = threadIdx.y; i < count; i += 16) total.add(lines[i * width + c]);
    }
    sums[threadIdx.y][threadIdx.x] = total.sum, rests[threadIdx.y][threadIdx.x] = total.rest;
    __syncthreads();
    if (threadIdx.y || c >= width) return;
    for (int y = 1; y < 16; y++) total.add(sums[y][threadIdx.x], rests[y][threadIdx.x]);
    put(c, total.whole());
}

// A division of 64 bits costs more than the rest of a small kernel.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
    return a >> 32 || b >> 32 ? a / b : static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}
__device__ __forceinline__ int64_t remainder(int64_t a, int64_t b) {
    return a >> 32 || b >> 32 ? a % b : static_cast<uint32_t>(a) % static_cast<uint32_t>(b);
}

// Multiprocessors of the current device.
inline int multiprocessors() {
    static int found[64] = {};
    int device = 0;
    cudaGetDevice(&device);
    if (device < 64 && found[device]) return found[device];
    int count = 1;
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (device < 64) found[device] = count;
    return count;
}

// The first two digits of the current device's number: 9.0 is 90.
inline int chip_here() {
    static int found[64] = {};
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    if (device < 64 && found[device]) return found[device];
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (device < 64) found[device] = 10 * major + minor;
    return 10 * major + minor;
}

// Whether the code that a chip runs was compiled for sm_80 or later (`present`, half.h). It is the newest that this build has and that
// is for no later chip: a build for sm_75 alone is compiled from its PTX on all that came after, and is still that of sm_75.
inline bool modern(int chip) {
    for (const int arch : {__CUDA_ARCH_LIST__})
        if (arch >= 800 && arch <= 10 * chip) return true;
    return false;
}

// Refuses bf16 where there are no kernels that compute in it.
inline void check_present(Call& call, Dtype dtype) {
    if (dtype != BF16) return;
    const int chip = chip_here();
    if (chip < 80) call.refuse("before compute capability 8.0 there are no kernels in bf16");
    if (!modern(chip)) call.refuse("no kernels in bf16, as this build is for compute capabilities before 8.0 alone; the GPU's is %d.%d", chip / 10, chip % 10);
}

// Blocks for a loop over `items` with a grid stride: enough to fill the chip, not more than there is to do.
inline int grid(int64_t items, int threads, int waves = 16) {
    const int64_t wanted = (items + threads - 1) / threads, most = int64_t{multiprocessors()} * waves;
    return static_cast<int>(wanted < most ? (wanted ? wanted : 1) : most);
}

}  // namespace
