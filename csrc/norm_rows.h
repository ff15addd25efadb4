// What the kernels of LayerNorm and RMSNorm on GPUs share: their arrays, which columns of a row are a thread's, sums over its threads.
//
// A thread's columns are two fours a pack, `gap` columns apart. Where arrays are in half precision these follow each other, and are 16
// bytes that are moved at once. Four of fp32 are 16 bytes themselves: there the second are the row's next 128 columns, so that what a
// warp moves at once lies side by side; eight in a row would be two passes over every other half of the same 32-byte sectors.
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

// Rows of a kernel for such dtypes are aligned, unless SHIFT.
template <int D, bool SHIFT = false>
constexpr int gap = !SHIFT && (D == F32 || D == ANY) ? 128 : 4;
// The first column of pack `pack`, neighbours' packs having neighbouring numbers.
template <int GAP>
__device__ __forceinline__ int column_of(int pack) {
    return pack * 8 - (GAP == 4 ? 0 : static_cast<int>(threadIdx.x % 32) * 4);
}

struct Problem {
    Tensor x, residual;      // backward: the gradient of the norm, and of the total by another way
    Tensor also, normed;     // backward: another gradient of the norm, which is added; what was normalised
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

// The same of two fours, `gap` apart, the first at e: a warp's, whose rows are aligned. Of eight neighbours two threads have a half.
template <int GAP>
__device__ __forceinline__ uint32_t kept_fours(int64_t e, uint64_t key, uint32_t threshold) {
    if (GAP == 4) return bits8(static_cast<uint64_t>(e) / 8, key, threshold);
    const bool odd = threadIdx.x % 2;
    const uint32_t mine = bits8(static_cast<uint64_t>(odd ? e - 4 + GAP : e) / 8, key, threshold);
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, mine, 1);
    return odd ? other >> 4 | (mine & 0xF0u) : (mine & 0x0Fu) | (other & 0x0Fu) << 4;
}

// 1 / sqrt(x), rounded almost always correctly: rsqrtf and one step of Newton with the product's rounding error
__device__ __forceinline__ float inverse_root(float x) {
    const float r = rsqrtf(x), high = x * r, low = fmaf(x, r, -high), e = fmaf(-low, r, fmaf(-high, r, 1.0f));
    return fabsf(e) < 1.0f ? fmaf(0.5f * r, e, r) : r;
}

// The same for a row of such a mean and spread in half precision. Of equal numbers it has twelve digits, with which the product of both
// is exact, and what the backward has of a number less their mean is nothing: at an eps of 1e-12 its rounding would be a tenth.
__device__ __forceinline__ float inverse_root(float spread, float mean, float eps) {
    const float found = inverse_root(spread + eps);
    return spread < 0x1p-38f * mean * mean ? __uint_as_float(__float_as_uint(found) & 0xFFFFF000u) : found;
}

struct Stats {
    float mean, rstd, shift;
    __device__ __forceinline__ float normal(float x) const { return fmaf(x - mean, rstd, shift); }
    static __device__ __forceinline__ Stats of(const Problem& p, int64_t row) {
        return p.centred ? Stats{p.stats[row], p.stats[p.rows + row], p.stats[2 * p.rows + row]} : Stats{0.0f, p.stats[row], 0.0f};
    }
    // by the first threads of a row
    template <bool CENTRED>
    __device__ __forceinline__ void put(const Problem& p, int64_t row) const {
        const auto t = static_cast<int>(threadIdx.x);
        if (t < (CENTRED ? 3 : 1)) p.stats[t * p.rows + row] = !CENTRED || t == 1 ? rstd : t ? shift : mean;
    }
};

// ---- sums over the threads of a row

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ __forceinline__ int warps() { return static_cast<int>(blockDim.x / 32); }
__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
__device__ __forceinline__ float from_lane(float x, int which) { return __shfl_sync(0xFFFFFFFFu, x, which); }
// the same of the eight lanes that this one is of; `lanes`: those of the warp that there are
__device__ __forceinline__ float from_eight(float x, int which, uint32_t lanes) { return __shfl_sync(lanes, x, which, 8); }

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

// N sums over N lanes at once: lane l gets that of x[l % N]. Each step passes on half of what is left: fewer steps than N trees.
template <int N>
__device__ __forceinline__ float few_sums(float (&x)[N], uint32_t lanes = 0xFFFFFFFFu) {
#pragma unroll
    for (int half = N / 2; half; half /= 2) {
        const bool upper = threadIdx.x & half;
#pragma unroll
        for (int i = 0; i < half; i++)
            x[i] = (upper ? x[i + half] : x[i]) + __shfl_xor_sync(lanes, upper ? x[i] : x[i + half], half);
    }
    return x[0];
}
// the same over a warp
template <int N>
__device__ __forceinline__ float warp_sums(float (&x)[N]) {
    return across<N>(few_sums(x));
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

// The same for all groups of a block together, of 32 or more threads, a multiple of eight: two may share a warp. Lane l gets that of
// x[l % N] of its own group.
template <int N, int ROWS, bool SHARED>
__device__ __forceinline__ float joint_sums(float (&x)[N], Board<ROWS, SHARED>& board, int& turn, uint32_t lanes) {
    static_assert(N == 2 || N == 4 || N == 8);
    const int own = static_cast<int>(threadIdx.y), size = static_cast<int>(blockDim.x), t = own * size + static_cast<int>(threadIdx.x);
    float sum = few_sums(x, lanes);
#pragma unroll
    for (int hop = N; hop < 8; hop *= 2) sum += __shfl_xor_sync(lanes, sum, hop);
#pragma unroll
    for (int hop = 8; hop < 32; hop *= 2) {  // so the first eight lanes get all of their group's, and the last
        const float other = __shfl_xor_sync(lanes, sum, hop);
        const int whose = (t ^ hop) - own * size;
        if (whose >= 0 && whose < size) sum += other;
    }
    const int first = t / 32 * 32;  // of the warp
    if (t % 32 < N || (t % 32 >= 24 && t % 32 < 24 + N && first < own * size)) board.said[turn][t / 32 + own][t % 8] = sum;
    __syncthreads();
    float whole = 0.0f;
    for (int i = own * size / 32; i <= (own * size + size - 1) / 32; i++) whole += board.said[turn][i + own][t % N];
    turn ^= 1;
    return whole;
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
            to.at[2 * k] = to_float(fp16{static_cast<uint16_t>(words[k])});
            to.at[2 * k + 1] = to_float(fp16{static_cast<uint16_t>(words[k] >> 16)});
        }
    }
    return to;
}
__device__ __forceinline__ uint32_t half_bits(float x, Dtype dtype) {
    return dtype == BF16 ? from_float<bf16>(x).bits : from_float<fp16>(x).bits;
}
__device__ __forceinline__ uint4 encode(const Eight& from, Dtype dtype) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float first = from.at[2 * k], second = from.at[2 * k + 1];
        words[k] = dtype == BF16 ? pack2<bf16>(first, second) : pack2<fp16>(first, second);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ Eight rounded(const Eight& from, Dtype dtype) {
    if (dtype == F32) return from;
    const uint4 words = encode(from, dtype);
    return decode({words.x, words.y, words.z, words.w}, dtype);
}

// A thread's fours, of which the first begins at `at`, which is aligned; bits of `valid` say which there are.
template <int D, int GAP>
__device__ __forceinline__ void put(const Tensor& to, int64_t at, const Eight& from, uint32_t valid) {
    char* place = static_cast<char*>(to.data) + at * size<D>(to);
    const bool first = GAP == 4 || valid & 1, second = GAP == 4 || valid & 16;
    if (kind<D>(to) == F32) {
        const auto word = [&](int k) { return __float_as_uint(from.at[k]); };
        if (first) *reinterpret_cast<uint4*>(place) = make_uint4(word(0), word(1), word(2), word(3));
        if (second) *reinterpret_cast<uint4*>(place + 4 * GAP) = make_uint4(word(4), word(5), word(6), word(7));
        return;
    }
    const uint4 words = encode(from, kind<D>(to));
    if (GAP == 4) {
        *reinterpret_cast<uint4*>(place) = words;
    } else {
        if (first) *reinterpret_cast<uint2*>(place) = make_uint2(words.x, words.y);
        if (second) *reinterpret_cast<uint2*>(place + 2 * GAP) = make_uint2(words.z, words.w);
    }
}

// Eight columns of a thread; some of them may be none of the row's.
template <bool SHIFT, int GAP>
struct Window {
    int first;
    uint32_t valid;  // bit k: column(k) is one
    __device__ __forceinline__ int column(int k) const { return first + k + (k < 4 ? 0 : GAP - 4); }
    __device__ __forceinline__ void set(int at, int dim) {
        first = at;
        if (!SHIFT) {
            valid = GAP == 4 ? (at < dim ? 0xFF : 0) : (at < dim ? 0x0F : 0) | (at + GAP < dim ? 0xF0 : 0);
            return;
        }
        valid = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) valid |= static_cast<uint32_t>(at + k >= 0 && at + k < dim) << k;
    }
    __device__ __forceinline__ bool has(int k) const { return SHIFT ? valid >> k & 1 : valid & (k < 4 ? 0x0F : 0xF0); }
    // of a row of numbers, all asked for before any is there
    __device__ __forceinline__ Eight read(const Tensor& from) const {
        Eight to{};
        if (from.data) MC_FOR_FLOAT(from.dtype, T, read(static_cast<const T*>(from.data), to))
        return to;
    }
    template <class T>
    __device__ __forceinline__ void read(const T* from, Eight& to) const {
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (has(k)) to.at[k] = to_float(from[column(k)]);
    }
    __device__ __forceinline__ void write(float* to, const Eight& from) const {
#pragma unroll
        for (int four = 0; !SHIFT && four < 8; four += 4)
            if (has(four))
                *reinterpret_cast<float4*>(to + column(four)) =
                    make_float4(from.at[four], from.at[four + 1], from.at[four + 2], from.at[four + 3]);
#pragma unroll
        for (int k = 0; SHIFT && k < 8; k++)
            if (has(k)) to[column(k)] = from.at[k];
    }
    // into the row that begins at element `at`
    template <int D>
    __device__ __forceinline__ void store(const Tensor& to, int64_t at, const Eight& from) const {
        if (!SHIFT ? valid : valid == 0xFF) {
            put<D, GAP>(to, at + first, from, valid);
        } else if (SHIFT && valid) {
            auto* place = static_cast<uint16_t*>(to.data) + at + first;
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (valid >> k & 1) place[k] = static_cast<uint16_t>(half_bits(from.at[k], kind<D>(to)));
        }
    }
};

// ---- rows of any length, of any of the dtypes and, where N is 1, of any alignment: read from the caches as often as there are sums

// N columns of a row: eight where rows are aligned.
template <int N>
struct Few {
    float at[N];
};
template <int N>
__device__ __forceinline__ Few<N> few(const Tensor& from, int64_t at) {
    Few<N> to{};
    MC_FOR_FLOAT(from.dtype, T, spread(load<(N > 1), N>(static_cast<const T*>(from.data) + at), to.at))
    return to;
}
template <int N>
__device__ __forceinline__ void put(const Tensor& to, int64_t at, const Few<N>& from) {
    MC_FOR_FLOAT(to.dtype, T, store<(N > 1)>(static_cast<T*>(to.data) + at, rounded<T>(from.at)))
}

// Bit k: is element e + k kept? e is a multiple of N.
template <int N>
__device__ __forceinline__ uint32_t kept_few(int64_t e, uint64_t key, uint32_t threshold) {
    if constexpr (N == 8) return bits8(static_cast<uint64_t>(e) / 8, key, threshold);
    return kept(philox(static_cast<uint64_t>(e) / 8, key), static_cast<int>(e % 8), threshold);
}

// f(the first of N columns) for all columns of a row, neighbours by neighbouring threads
template <int N = 1, class F>
__device__ __forceinline__ void columns(int64_t dim, F f) {
    for (int64_t c = int64_t{threadIdx.x} * N; c < dim; c += int64_t{blockDim.x} * N) f(c);
}

// ---- launching

int slots_of(const Tensor& tensor) { return tensor.data ? tensor.size() / 2 : 0; }
// Of a block for rows of any length, whose threads have equally much to do: at most half of a multiprocessor's that have 64 registers,
// so that another row is under way meanwhile.
constexpr int HALF_OF_ALL = 512;
int threads_for(int64_t dim, int each) {
    const int64_t packs = (dim + each - 1) / each, rounds = (packs + HALF_OF_ALL - 1) / HALF_OF_ALL;
    return static_cast<int>((packs + 32 * rounds - 1) / (32 * rounds) * 32);
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
    const Rate of(rate);
    p.seed = seed.as<int64_t>(), p.threshold = of.threshold, p.scale = of.scale;
}

}  // namespace
