// What the kernels of LayerNorm and RMSNorm on GPUs share: their arrays, eight elements at a time, and sums over the threads of a row.
#pragma once
#include "cuda.h"
#include "norm.h"
#include "philox.h"
#include "ptx.h"

namespace {

// An array of eights; `wide`: of fp32.
struct Tensor {
    void* data;
    Dtype dtype;
    __device__ __host__ __forceinline__ int size() const { return dtype == F32 ? 4 : 2; }
    __device__ __forceinline__ float one(int64_t at) const {
        MC_FOR_FLOAT(dtype, T, return to_float(static_cast<const T*>(data)[at]))
        return 0.0f;
    }
    __device__ __forceinline__ void put(int64_t at, float value) const {
        MC_FOR_FLOAT(dtype, T, static_cast<T*>(data)[at] = from_float<T>(value))
    }
    // How far element `at` lies behind an aligned pack.
    __device__ __forceinline__ int skew(int64_t at) const {
        return static_cast<int>((reinterpret_cast<uintptr_t>(data) / size() + at) % 8);
    }
};

constexpr int ANY = 0;  // a dtype known only when the kernel runs; nvcc cannot name an enumeration of another namespace in a kernel
template <int D>
__device__ __forceinline__ Dtype kind(const Tensor& tensor) {
    return D == ANY ? tensor.dtype : static_cast<Dtype>(D);
}
template <int D>
__device__ __forceinline__ int size(const Tensor& tensor) {
    return kind<D>(tensor) == F32 ? 4 : 2;
}

struct Problem {
    Tensor x, residual;      // backward: the gradient of the norm, and of the total by another way
    Tensor normed;           // backward: what was normalised
    Tensor weight, bias;
    Tensor out, total;       // backward: the gradients of the branch and of the total
    const int64_t* seed;
    uint32_t threshold;
    float scale, eps;
    bool centred, alike;     // alike: results are equally far from alignment
    float *stats, *partial;
    int64_t rows, dim;
    int64_t groups;          // over all blocks
    int stages;
};

// Bit i: is element e + i kept? Where e is a multiple of 8 they share one counter.
__device__ __forceinline__ uint32_t bits8(uint64_t counter, uint64_t key, uint32_t threshold) {
    const Words words = philox(counter, key);
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) found |= static_cast<uint32_t>(kept(words, i, threshold)) << i;
    return found;
}
__device__ __noinline__ uint32_t kept8(int64_t e, uint64_t key, uint32_t threshold) {
    const auto counter = static_cast<uint64_t>(e >> 3);
    const int within = static_cast<int>(e & 7);
    uint32_t found = bits8(counter, key, threshold);
    if (within) found = (found | bits8(counter + 1, key, threshold) << 8) >> within & 0xFFu;
    return found;
}

// 1 / sqrt(x), rounded almost always correctly: rsqrtf and one step of Newton with the product's rounding error
__device__ __forceinline__ float inverse_root(float x) {
    const float r = rsqrtf(x), high = x * r, low = fmaf(x, r, -high), e = fmaf(-low, r, fmaf(-high, r, 1.0f));
    return fabsf(e) < 1.0f ? fmaf(0.5f * r, e, r) : r;
}

struct Stats {
    float mean, rstd, shift;
    __device__ __forceinline__ float normal(float x) const { return fmaf(x - mean, rstd, shift); }
};

// ---- sums over the threads of a row

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ __forceinline__ int warps() { return static_cast<int>(blockDim.x / 32); }
__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
__device__ __forceinline__ float from_lane(float x, int which) { return __shfl_sync(0xFFFFFFFFu, x, which); }

// The threads of a group wait for each other; other groups of the block go on. A block that may be of several groups (SHARED) takes
// all named barriers, of which a multiprocessor has enough for four such blocks only.
template <bool SHARED>
__device__ __forceinline__ void group_barrier() {
    if (blockDim.x == 32) return __syncwarp();
    if (!SHARED) return __syncthreads();
    wait_for(static_cast<int>(threadIdx.y) + 1, static_cast<int>(blockDim.x));
}

// x over the lanes that are a multiple of N apart
template <int N>
__device__ __forceinline__ float across(float x) {
#pragma unroll
    for (int hop = N; hop < 32; hop *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, hop);
    return x;
}

// N sums over a warp at once: lane l gets that of x[l % N]. Each step passes on half of what is left: fewer steps than N trees.
template <int N>
__device__ __forceinline__ float warp_sums(float (&x)[N]) {
#pragma unroll
    for (int half = N / 2; half; half /= 2) {
        const bool upper = threadIdx.x & half;
#pragma unroll
        for (int i = 0; i < half; i++)
            x[i] = (upper ? x[i + half] : x[i]) + __shfl_xor_sync(0xFFFFFFFFu, upper ? x[i] : x[i + half], half);
    }
    return across<N>(x[0]);
}

// What the warps of a block tell each other; in turns, so that one barrier is enough.
template <int ROWS, bool SHARED>
struct Board {
    float said[2][32][2 * ROWS];
};

// N sums over a group, lane l getting that of x[l % N]
template <int N, int ROWS, bool SHARED>
__device__ __forceinline__ float group_sums(float (&x)[N], Board<ROWS, SHARED>& board, int& turn) {
    const int first = static_cast<int>(threadIdx.y) * warps();
    const float sum = warp_sums(x);
    if (blockDim.x == 32) return sum;
    if (lane() < N) board.said[turn][first + warp()][lane()] = sum;
    group_barrier<SHARED>();
    float whole = 0.0f;
    for (int i = lane() / N; i < warps(); i += 32 / N) whole += board.said[turn][first + i][lane() % N];
    turn ^= 1;
    return across<N>(whole);
}

// ---- eights

struct Eight {
    float at[8];
};

template <int WORDS>
__device__ __forceinline__ Eight decode(const uint32_t (&words)[WORDS], Dtype dtype) {
    Eight to;
    if (WORDS >= 8 && dtype == F32) {
#pragma unroll
        for (int k = 0; k < 8; k++) to.at[k] = __uint_as_float(words[k % WORDS]);
    } else if (dtype == BF16) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            to.at[2 * k] = __uint_as_float(words[k] << 16);
            to.at[2 * k + 1] = __uint_as_float(words[k] & 0xFFFF0000u);
        }
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            to.at[2 * k] = to_float(__ushort_as_half(static_cast<unsigned short>(words[k])));
            to.at[2 * k + 1] = to_float(__ushort_as_half(static_cast<unsigned short>(words[k] >> 16)));
        }
    }
    return to;
}
__device__ __forceinline__ uint32_t half_bits(float x, Dtype dtype) {
    return dtype == BF16 ? __bfloat16_as_ushort(from_float<bf16>(x)) : __half_as_ushort(from_float<fp16>(x));
}
__device__ __forceinline__ uint4 encode(const Eight& from, Dtype dtype) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; k++) words[k] = half_bits(from.at[2 * k], dtype) | half_bits(from.at[2 * k + 1], dtype) << 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ Eight rounded(const Eight& from, Dtype dtype) {
    if (dtype == F32) return from;
    const uint4 words = encode(from, dtype);
    return decode({words.x, words.y, words.z, words.w}, dtype);
}

// eight elements from `at` on, which is aligned
template <int D>
__device__ __forceinline__ void put(const Tensor& to, int64_t at, const Eight& from) {
    auto* place = reinterpret_cast<uint4*>(static_cast<char*>(to.data) + at * size<D>(to));
    if (kind<D>(to) != F32) {
        *place = encode(from, kind<D>(to));
    } else {
        const auto word = [&](int k) { return __float_as_uint(from.at[k]); };
        place[0] = make_uint4(word(0), word(1), word(2), word(3));
        place[1] = make_uint4(word(4), word(5), word(6), word(7));
    }
}

// Eight columns of a thread; some of them may be none of the row's.
template <bool SHIFT>
struct Window {
    int first;
    uint32_t valid;  // bit k: column first + k is one
    __device__ __forceinline__ void set(int at, int dim) {
        first = at, valid = !SHIFT && at < dim ? 0xFF : 0;
#pragma unroll
        for (int k = 0; SHIFT && k < 8; k++) valid |= static_cast<uint32_t>(at + k >= 0 && at + k < dim) << k;
    }
    __device__ __forceinline__ bool has(int k) const { return SHIFT ? valid >> k & 1 : valid != 0; }
    __device__ __forceinline__ Eight read(const Tensor& from) const {
        Eight to;
#pragma unroll 1
        for (int k = 0; k < 8; k++) to.at[k] = has(k) && from.data ? from.one(first + k) : 0.0f;
        return to;
    }
    // into the row that begins at element `at`
    template <int D>
    __device__ __forceinline__ void store(const Tensor& to, int64_t at, const Eight& from) const {
        if (valid == 0xFF) {
            put<D>(to, at + first, from);
        } else if (SHIFT && valid && kind<D>(to) != F32) {
            auto* place = static_cast<uint16_t*>(to.data) + at + first;
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (valid >> k & 1) place[k] = static_cast<uint16_t>(half_bits(from.at[k], kind<D>(to)));
        } else if (SHIFT && valid) {
            auto* place = static_cast<float*>(to.data) + at + first;
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (valid >> k & 1) place[k] = from.at[k];
        }
    }
};

// f(column) for all columns of a row, neighbours by neighbouring threads: rows of any length and alignment, read from the first
// cache as often as there are sums
template <class F>
__device__ __forceinline__ void columns(int64_t dim, F f) {
    for (int64_t c = threadIdx.x; c < dim; c += blockDim.x) f(c);
}

// ---- launching

int slots_of(const Tensor& tensor) { return tensor.data ? tensor.size() / 2 : 0; }
int threads_for(int64_t dim) {
    const int64_t wanted = (dim + 127) / 128 * 32;
    return static_cast<int>(wanted < 1024 ? wanted : 1024);
}

// What is added and what comes out may be in half precision around a total in fp32; otherwise all three are one dtype.
bool known(Dtype x, Dtype total, Dtype out) {
    if (total != F32) return x == total && out == total;
    return x == F32 || out == F32 || x == out;
}

Tensor tensor(const Array& array) { return {array.data, array.dtype}; }

// Whether rows begin at aligned packs in every array of these, all of one shape.
template <class... Arrays>
bool packed(int64_t dim, const Arrays&... arrays) {
    return dim % 8 == 0 && (arrays.aligned() && ...);
}
// Whether the results, of one shape, are equally far from alignment.
bool alike(const Array& a, const Array& b) {
    const auto skew = [](const Array& x) { return reinterpret_cast<uintptr_t>(x.data) / (x.dtype == F32 ? 4 : 2) % 8; };
    return !b || skew(a) == skew(b);
}

void set_rate(Problem& p, const Array& seed, double rate) {
    p.seed = seed.as<int64_t>();
    p.threshold = static_cast<uint32_t>(rate * 65536 + 0.5);
    p.scale = p.threshold >= 65536 ? 0.0f : 65536.0f / (65536 - p.threshold);
}

}  // namespace
