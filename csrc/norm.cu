// LayerNorm and RMSNorm over the last axis, each with an optional residual add and dropout before it: norm.cpp has the formulas.
//
// A group of warps takes ROWS rows at a time, a thread PACKS times eight neighbouring columns of them: the weights and the sums for
// their gradients stay in its registers for good, and a barrier and a reduction serve all of these rows. As many blocks as fit walk
// over the rows; rows to come are on their way into shared memory meanwhile (cp.async). The groups write their sums for weight and
// bias to lines of `partial`, which a second kernel adds up in a fixed order.
//
// Memory moves in aligned packs of eight elements even where rows are not aligned (SHIFT): a thread's columns are those of aligned
// packs of the result, an input is copied in its own aligned packs, and a thread takes its columns from two of them. Which columns
// these are depends on the row's number modulo 8 at most, and a group takes rows for which it is the same.
//
// Arithmetic is in fp32. Some kernels are for arrays all in bf16 or fp16; those for all else ask for the dtype of each pack. Rows for
// which the ring has no room are read again for each sum (norm_any_rows).
//
// Bytes an element must move in bf16: forward 4 (8 with a residual), backward 6 (8).
#include "cuda.h"
#include "philox.h"

namespace {

constexpr int THREADS = 640;  // of a block, at most, with 96 registers each
constexpr int STAGES = 4;     // of the ring in shared memory, at most

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

// The threads of a group wait for each other; other groups of the block go on.
__device__ __forceinline__ void group_barrier() {
    if (blockDim.x == 32) return __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(threadIdx.y) + 1), "r"(static_cast<int>(blockDim.x)) : "memory");
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
template <int ROWS>
struct Board {
    float said[2][32][2 * ROWS];
};

// N sums over a group, lane l getting that of x[l % N]
template <int N, int ROWS>
__device__ __forceinline__ float group_sums(float (&x)[N], Board<ROWS>& board, int& turn) {
    const int first = static_cast<int>(threadIdx.y) * warps();
    const float sum = warp_sums(x);
    if (blockDim.x == 32) return sum;
    if (lane() < N) board.said[turn][first + warp()][lane()] = sum;
    group_barrier();
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
        first = at, valid = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) valid |= static_cast<uint32_t>(at + k >= 0 && at + k < dim) << k;
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

// ---- rows in shared memory: for each row to come a slot of 16 bytes, or two of fp32, for each pack of eight

// 16 bytes, or zeros
__device__ __forceinline__ void copy16(uint4* to, const void* from, bool exists) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(exists ? 16 : 0) : "memory");
#else
    *to = exists ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#endif
}
__device__ __forceinline__ void commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// until no more than `newer` groups of copies are on their way
__device__ __forceinline__ void wait(int newer) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if (newer == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
    else if (newer == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
    else asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}

// The memory of a group: slot after slot, in each a pack for every PACKS of every thread.
template <int PACKS>
struct Ring {
    uint4* base;
    __device__ __forceinline__ int packs() const { return PACKS * static_cast<int>(blockDim.x); }
    __device__ __forceinline__ static int pack(int j) { return static_cast<int>(threadIdx.x + j * blockDim.x); }
    __device__ __forceinline__ uint4* at(int slot, int j) const { return base + slot * packs() + pack(j); }
};

// An input whose rows pass through the ring.
template <int D, bool SHIFT, int PACKS>
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
    __device__ __forceinline__ int first(int j) const { return Ring<PACKS>::pack(j) * 8 - skew; }
    __device__ __forceinline__ bool copies(int j, int dim) const { return first(j) < dim && (!SHIFT || first(j) + 8 > 0); }
    // Zeros where no copy writes.
    __device__ __forceinline__ void clear(const Ring<PACKS>& ring, int slot, int dim) const {
#pragma unroll
        for (int j = 0; j < PACKS; j++)
            if (!copies(j, dim))
                for (int i = 0; i < slots(); i++) *ring.at(slot + i, j) = make_uint4(0, 0, 0, 0);
    }
    // The row that begins at element `at`, or zeros where there is none.
    __device__ __forceinline__ void copy(const Ring<PACKS>& ring, int slot, int64_t at, int dim, bool exists) const {
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            if (!copies(j, dim)) continue;
            const int64_t start = exists ? at + first(j) : 0;
            const char* place = static_cast<const char*>(from.data) + start * size<D>(from);
            if (SHIFT && exists && start + 8 > end) {  // the array ends within this pack, and perhaps the memory that may be read
                part(ring.at(slot, j), place, static_cast<int>(end - start) * size<D>(from));
                continue;
            }
            copy16(ring.at(slot, j), place, exists);
            if (kind<D>(from) == F32) copy16(ring.at(slot + 1, j), place + 16, exists);
        }
    }
    // `bytes` of a pack, and zeros
    __device__ __forceinline__ void part(uint4* to, const char* place, int bytes) const {
        auto* words = reinterpret_cast<uint16_t*>(to);
        const int apart = 8 * (PACKS * static_cast<int>(blockDim.x) - 1);  // from a slot's pack to that of the next slot
        for (int i = 0; i < 8 * slots(); i++)
            words[i + (i < 8 ? 0 : apart)] = 2 * i < bytes ? reinterpret_cast<const uint16_t*>(place)[i] : 0;
    }
    __device__ __forceinline__ Eight get(const Ring<PACKS>& ring, int slot, int j, uint32_t valid) const {
        Eight to;
        if (kind<D>(from) == F32) {
            uint32_t words[SHIFT ? 16 : 8];
            read(words, ring.at(slot, j)), read(words + 4, ring.at(slot + 1, j));
            if (SHIFT && shift) {
                const int next = Ring<PACKS>::pack(j) + 1 < ring.packs() ? 1 : 0;
                read(words + 8 % (SHIFT ? 16 : 8), ring.at(slot, j) + next);
                read(words + 12 % (SHIFT ? 16 : 8), ring.at(slot + 1, j) + next);
                behind<4>(words);
            }
            to = decode(words, F32);
        } else {
            uint32_t words[SHIFT ? 8 : 4];
            read(words, ring.at(slot, j));
            if (SHIFT && shift) {
                const int next = Ring<PACKS>::pack(j) + 1 < ring.packs() ? 1 : 0;
                read(words + 4 % (SHIFT ? 8 : 4), ring.at(slot, j) + next);
                behind<2>(words);
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
    // the elements, of SIZE bytes, from `shift` on of two packs
    template <int SIZE, int WORDS>
    __device__ __forceinline__ void behind(uint32_t (&words)[WORDS]) const {
        if (shift & 4)
#pragma unroll
            for (int i = 0; i + SIZE < WORDS; i++) words[i] = words[i + SIZE];
        if (shift & 2)
#pragma unroll
            for (int i = 0; i + SIZE / 2 < WORDS - SIZE; i++) words[i] = words[i + SIZE / 2];
        if (shift & 1)
#pragma unroll
            for (int i = 0; i < WORDS / 2; i++)
                words[i] = SIZE == 4 ? words[i + 1] : __funnelshift_r(words[i], words[i + 1], 16);
    }
};

// f(row, at, slot) for the first of every ROWS rows of this group, which are p.groups apart, and the element that it begins at;
// copy(at, slot, exists) has started what brings one.
template <int ROWS, bool SHIFT, class Copy, class F>
__device__ __forceinline__ void walk(const Problem& p, int64_t group, int slots, Copy copy, F f) {
    const int64_t step = p.groups * ROWS, apart = p.groups * p.dim;
    int64_t next = group, ahead = group * p.dim;
    const auto bring = [&](int stage) {
        if (next < p.rows)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                copy(ahead + r * apart, (stage * ROWS + r) * slots, ROWS == 1 || next + r * p.groups < p.rows);
        next += step, ahead += ROWS * apart;
        commit();
    };
    for (int i = 0; i + 1 < p.stages; i++) bring(i);
    int stage = 0;
    int64_t at = group * p.dim;
#pragma unroll 1
    for (int64_t row = group; row < p.rows; row += step, at += ROWS * apart) {
        wait(p.stages - 2);
        if (SHIFT) group_barrier();  // what neighbours have copied; and they have done with what is overwritten next
        bring(stage ? stage - 1 : p.stages - 1);
        f(row, at, stage * ROWS * slots);
        if (++stage == p.stages) stage = 0;
    }
    wait(0);
}

// ---- forward

// Eights that stay in registers, as they are in memory where that is half precision.
template <int D>
struct Kept {
    uint4 words;
    __device__ __forceinline__ Eight get() const { return decode<4>({words.x, words.y, words.z, words.w}, static_cast<Dtype>(D)); }
    __device__ __forceinline__ void set(const Eight& from) { words = encode(from, static_cast<Dtype>(D)); }
    __device__ __forceinline__ void take(const uint4& from) { words = from; }
};
template <>
struct Kept<ANY> {
    Eight own;
    __device__ __forceinline__ Eight get() const { return own; }
    __device__ __forceinline__ void set(const Eight& from) { own = from; }
    __device__ __forceinline__ void take(const uint4&) {}
};

template <int D, bool CENTRED, bool SHIFT, int PACKS, int ROWS>
__global__ void __launch_bounds__(THREADS) norm_rows(const Problem p) {
    extern __shared__ uint4 memory[];
    __shared__ Board<ROWS> board;
    const int dim = static_cast<int>(p.dim);
    const int64_t group = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const bool adds = p.residual.data;
    const int skew = SHIFT ? p.out.skew(group * dim) : 0;
    const Source<D, SHIFT, PACKS> x(p.x, p.rows * p.dim, group * dim, skew);
    const Source<D, SHIFT, PACKS> residual(adds ? p.residual : p.x, p.rows * p.dim, group * dim, skew);
    const int after = x.slots(), slots = after + (adds ? residual.slots() : 0);
    Ring<PACKS> ring{memory};
    ring.base += threadIdx.y * ring.packs() * p.stages * ROWS * slots;
    for (int i = 0; i < p.stages * ROWS; i++) {
        x.clear(ring, i * slots, dim);
        if (adds) residual.clear(ring, i * slots + after, dim);
    }
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    const float scale = p.seed ? p.scale : 1.0f;
    Window<SHIFT> mine[PACKS];
    Eight w[PACKS], b[PACKS];
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        mine[j].set(ring.pack(j) * 8 - skew, dim);
        w[j] = mine[j].read(p.weight), b[j] = mine[j].read(p.bias);
    }
    if (SHIFT) group_barrier();
    const int64_t apart = p.groups * p.dim;
    int turn = 0;
    walk<ROWS, SHIFT>(
        p, group, slots,
        [&](int64_t at, int slot, bool exists) {
            x.copy(ring, slot, at, dim, exists);
            if (adds) residual.copy(ring, slot + after, at, dim, exists);
        },
        [&](int64_t row, int64_t start, int slot) {
            Kept<D> h[ROWS][PACKS];
            // at once, as the rows come: what is good enough in half precision where the mean is small beside the spread
            constexpr bool ONCE = CENTRED && D != ANY;
            float sums[ONCE ? 2 * ROWS : ROWS] = {};
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
#pragma unroll
                for (int j = 0; j < PACKS; j++) {
                    Eight v = x.get(ring, slot + r * slots, j, mine[j].valid);
                    if (adds) {
                        const int64_t at = start + r * apart;
                        const Eight more = residual.get(ring, slot + r * slots + after, j, mine[j].valid);
                        const uint32_t keep = p.seed ? kept8(at + mine[j].first, key, p.threshold) : 0xFFu;
#pragma unroll
                        for (int k = 0; k < 8; k++) v.at[k] = (keep >> k & 1 ? v.at[k] * scale : 0.0f) + more.at[k];
                        v = rounded(v, kind<D>(p.total));
                        if (row + r * p.groups < p.rows) mine[j].template store<D>(p.total, at, v);
                    }
                    if (D == ANY || SHIFT || adds) h[r][j].set(v);
                    else h[r][j].take(*ring.at(slot + r * slots, j));
#pragma unroll
                    for (int k = 0; k < 8; k++) {
                        sums[r] = CENTRED ? sums[r] + v.at[k] : fmaf(v.at[k], v.at[k], sums[r]);
                        if (ONCE) sums[r + ROWS * ONCE] = fmaf(v.at[k], v.at[k], sums[r + ROWS * ONCE]);
                    }
                }
            }
            Stats found{};  // lane l has those of row l % ROWS
            const float means = group_sums(sums, board, turn) / static_cast<float>(dim);
            float squares = means;
            bool again = CENTRED;
            if (CENTRED) found.mean = from_lane(means, lane() % ROWS);
            if (ONCE) {
                squares = from_lane(means, ROWS + lane() % ROWS) - found.mean * found.mean;
                again = __any_sync(0xFFFFFFFFu, found.mean * found.mean > 16.0f * squares);
            }
            if (CENTRED && again) {
                // about the mean as it was rounded; in half precision nothing shows of what that leaves
                constexpr int SUMS = D == ANY ? 2 : 1;
                float about[SUMS * ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float mean = from_lane(found.mean, r);
                    float left = 0.0f, square = 0.0f;
#pragma unroll
                    for (int j = 0; j < PACKS; j++) {
                        const Eight v = h[r][j].get();
                        const float near = mine[j].valid ? mean : 0.0f;
#pragma unroll
                        for (int k = 0; k < 8; k++) {
                            const float d = !SHIFT || mine[j].has(k) ? v.at[k] - near : 0.0f;
                            left += d;
                            square = fmaf(d, d, square);
                        }
                    }
                    about[r] = square;
                    if (SUMS == 2) about[(SUMS - 1) * ROWS + r] = left;
                }
                squares = group_sums(about, board, turn) / static_cast<float>(dim);
                if (SUMS == 2) {
                    const float left = from_lane(squares, ROWS + lane() % ROWS);
                    found.shift = left, squares = from_lane(squares, lane() % ROWS) - left * left;
                }
            }
            found.rstd = inverse_root(squares + p.eps);
            found.shift *= -found.rstd;
            if (threadIdx.x < ROWS && row + threadIdx.x * p.groups < p.rows) {
                float* to = p.stats + row + threadIdx.x * p.groups;
                to[0] = found.mean, to[p.rows] = found.rstd, to[2 * p.rows] = found.shift;
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                Stats s{};
                s.rstd = from_lane(found.rstd, r);
                if (CENTRED) s.mean = from_lane(found.mean, r), s.shift = D == ANY ? from_lane(found.shift, r) : 0.0f;
                const float minus = -s.mean * s.rstd;
                if (row + r * p.groups >= p.rows) continue;
#pragma unroll
                for (int j = 0; j < PACKS; j++) {
                    Eight y = h[r][j].get();
#pragma unroll
                    for (int k = 0; k < 8; k++)
                        y.at[k] = !CENTRED ? y.at[k] * s.rstd : again ? s.normal(y.at[k]) : fmaf(y.at[k], s.rstd, minus);
#pragma unroll
                    for (int k = 0; k < 8; k++) y.at[k] = fmaf(y.at[k], w[j].at[k], b[j].at[k]);
                    mine[j].template store<D>(p.out, start + r * apart, y);
                }
            }
        });
}

// f(column) for all columns of a row, neighbours by neighbouring threads: rows of any length and alignment, read from the first
// cache as often as there are sums
template <class F>
__device__ __forceinline__ void columns(int64_t dim, F f) {
    for (int64_t c = threadIdx.x; c < dim; c += blockDim.x) f(c);
}

__global__ void __launch_bounds__(1024) norm_any_rows(const Problem p) {
    __shared__ Board<1> board;
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    const float scale = p.seed ? p.scale : 1.0f, all = static_cast<float>(p.dim);
    const Tensor h = p.residual.data ? p.total : p.x;
    int turn = 0;
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const int64_t at = row * p.dim;
        if (p.residual.data)
            columns((p.dim + 7) / 8, [&](int64_t i) {
                const uint32_t keep = p.seed ? kept8(at + i * 8, key, p.threshold) : 0xFFu;
                for (int k = 0; k < 8 && i * 8 + k < p.dim; k++) {
                    const int64_t e = at + i * 8 + k;
                    p.total.put(e, (keep >> k & 1 ? p.x.one(e) * scale : 0.0f) + p.residual.one(e));
                }
            });
        __syncthreads();
        const auto each = [&](auto f) { columns(p.dim, [&](int64_t c) { f(h.one(at + c)); }); };
        float sum[1] = {}, about[2] = {};
        if (p.centred) each([&](float v) { sum[0] += v; });
        const float mean = p.centred ? group_sums(sum, board, turn) / all : 0.0f;
        each([&](float v) {
            about[0] = fmaf(v - mean, v - mean, about[0]);
            about[1] += v - mean;
        });
        const float found = group_sums(about, board, turn) / all;
        const float left = p.centred ? from_lane(found, 1) : 0.0f, rstd = inverse_root(from_lane(found, 0) - left * left + p.eps);
        const Stats s{mean, rstd, -left * rstd};
        if (threadIdx.x == 0) p.stats[row] = s.mean, p.stats[p.rows + row] = s.rstd, p.stats[2 * p.rows + row] = s.shift;
        columns(p.dim, [&](int64_t c) {
            p.out.put(at + c, fmaf(s.normal(h.one(at + c)), p.weight.one(c), p.bias.data ? p.bias.one(c) : 0.0f));
        });
    }
}

// ---- backward

template <int D, bool CENTRED, bool SHIFT, int PACKS, int ROWS>
__global__ void __launch_bounds__(THREADS) norm_rows_backward(const Problem p) {
    constexpr int SUMS = CENTRED ? 2 : 1;
    extern __shared__ uint4 memory[];
    __shared__ Board<ROWS> board;
    const int dim = static_cast<int>(p.dim);
    const int64_t group = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const int skew = SHIFT ? p.total.skew(group * dim) : 0;
    const bool adds = p.residual.data;
    const Source<D, SHIFT, PACKS> grad(p.x, p.rows * p.dim, group * dim, skew),
        normed(p.normed, p.rows * p.dim, group * dim, skew);
    const Source<D, SHIFT, PACKS> residual(adds ? p.residual : p.x, p.rows * p.dim, group * dim, skew);
    const int after = grad.slots(), last = after + normed.slots(), slots = last + (adds ? residual.slots() : 0);
    Ring<PACKS> ring{memory};
    ring.base += threadIdx.y * ring.packs() * p.stages * ROWS * slots;
    for (int i = 0; i < p.stages * ROWS; i++) {
        grad.clear(ring, i * slots, dim);
        normed.clear(ring, i * slots + after, dim);
        if (adds) residual.clear(ring, i * slots + last, dim);
    }
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    const float share = 1.0f / static_cast<float>(dim), scale = p.seed ? p.scale : 1.0f;
    Window<SHIFT> mine[PACKS];
    Eight w[PACKS], dw[PACKS] = {}, db[PACKS] = {};
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        mine[j].set(ring.pack(j) * 8 - skew, dim);
        w[j] = mine[j].read(p.weight);
    }
    int turn = 0;
    // lane l has statistic l / ROWS of row l % ROWS
    const auto read_stats = [&](int64_t row) {
        const int64_t mine = row + lane() % ROWS * p.groups;
        return lane() < 3 * ROWS && mine < p.rows ? p.stats[lane() / ROWS * p.rows + mine] : 0.0f;
    };
    const auto stats = [&](float held, int r) {
        const float rstd = from_lane(held, ROWS + r);
        return CENTRED ? Stats{from_lane(held, r), rstd, D == ANY ? from_lane(held, 2 * ROWS + r) : 0.0f} : Stats{0.0f, rstd, 0.0f};
    };
    const auto normal = [](const Stats& s, float x) {
        return D == ANY && CENTRED ? s.normal(x) : (CENTRED ? x - s.mean : x) * s.rstd;
    };
    const int64_t apart = p.groups * p.dim;
    float next = read_stats(group);
    if (SHIFT) group_barrier();
        walk<ROWS, SHIFT>(
            p, group, slots,
            [&](int64_t at, int slot, bool exists) {
                grad.copy(ring, slot, at, dim, exists);
                normed.copy(ring, slot + after, at, dim, exists);
                if (adds) residual.copy(ring, slot + last, at, dim, exists);
            },
            [&](int64_t row, int64_t start, int slot) {
                const float held = next;
                next = read_stats(row + ROWS * p.groups);
                float sums[SUMS * ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const Stats s = stats(held, r);
                    float level = 0.0f, skewed = 0.0f;
#pragma unroll
                    for (int j = 0; j < PACKS; j++) {
                        const Eight g = grad.get(ring, slot + r * slots, j, mine[j].valid);
                        const Eight v = normed.get(ring, slot + r * slots + after, j, mine[j].valid);
#pragma unroll
                        for (int k = 0; k < 8; k++) {  // no column, no row: a gradient of zero
                            const float h = normal(s, v.at[k]), weighted = g.at[k] * w[j].at[k];
                            dw[j].at[k] = fmaf(g.at[k], h, dw[j].at[k]);
                            if (CENTRED) db[j].at[k] += g.at[k], level += weighted;
                            skewed = fmaf(weighted, h, skewed);
                        }
                    }
                    sums[r] = skewed;
                    if (CENTRED) sums[(SUMS - 1) * ROWS + r] = level;
                }
                const float found = group_sums(sums, board, turn) * share;
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const int64_t at = start + r * apart;
                    const Stats s = stats(held, r);
                    const float skewed = from_lane(found, r), level = CENTRED ? from_lane(found, (SUMS - 1) * ROWS + r) : 0.0f;
                    if (ROWS > 1 && row + r * p.groups >= p.rows) continue;
#pragma unroll
                    for (int j = 0; j < PACKS; j++) {
                        Eight d = grad.get(ring, slot + r * slots, j, mine[j].valid);  // again, rather than in registers meanwhile
                        const Eight v = normed.get(ring, slot + r * slots + after, j, mine[j].valid);
#pragma unroll
                        for (int k = 0; k < 8; k++)
                            d.at[k] = fmaf(-normal(s, v.at[k]), skewed, fmaf(d.at[k], w[j].at[k], -level)) * s.rstd;
                        if (adds) {
                            const Eight more = residual.get(ring, slot + r * slots + last, j, mine[j].valid);
#pragma unroll
                            for (int k = 0; k < 8; k++) d.at[k] += more.at[k];
                        }
                        mine[j].template store<D>(p.total, at, d);
                        if (!p.out.data) continue;
                        d = rounded(d, kind<D>(p.total));
                        const uint32_t keep = p.seed ? kept8(at + mine[j].first, key, p.threshold) : 0xFFu;
#pragma unroll
                        for (int k = 0; k < 8; k++) d.at[k] = keep >> k & 1 ? d.at[k] * scale : 0.0f;
                        mine[j].template store<D>(p.out, at, d);
                    }
                }
            });
    float* line = p.partial + group * SUMS * dim;
#pragma unroll
    for (int j = 0; j < PACKS; j++)
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (mine[j].has(k)) {
                line[mine[j].first + k] = dw[j].at[k];
                if (CENTRED) line[dim + mine[j].first + k] = db[j].at[k];
            }
}

// Rows of any length and alignment: a block each; the sums for weight and bias are another kernel's.
__global__ void __launch_bounds__(1024) norm_any_rows_backward(const Problem p) {
    __shared__ Board<1> board;
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    int turn = 0;
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const int64_t at = row * p.dim;
        const Stats s = {p.stats[row], p.stats[p.rows + row], p.stats[2 * p.rows + row]};
        const auto each = [&](auto f) {
            columns(p.dim, [&](int64_t c) { f(at + c, p.x.one(at + c) * p.weight.one(c), s.normal(p.normed.one(at + c))); });
        };
        float sums[2] = {};
        each([&](int64_t, float g, float h) {
            sums[0] += g;
            sums[1] = fmaf(g, h, sums[1]);
        });
        const float found = group_sums(sums, board, turn) / static_cast<float>(p.dim);
        const float level = p.centred ? from_lane(found, 0) : 0.0f, skewed = from_lane(found, 1);
        each([&](int64_t e, float g, float h) {
            const float d = (g - level - h * skewed) * s.rstd;
            p.total.put(e, p.residual.data ? d + p.residual.one(e) : d);
        });
        if (!p.out.data) continue;
        __syncthreads();
        columns((p.dim + 7) / 8, [&](int64_t i) {
            const uint32_t keep = p.seed ? kept8(at + i * 8, key, p.threshold) : 0xFFu;
            for (int k = 0; k < 8 && i * 8 + k < p.dim; k++) {
                const int64_t e = at + i * 8 + k;
                p.out.put(e, keep >> k & 1 ? p.total.one(e) * (p.seed ? p.scale : 1.0f) : 0.0f);
            }
        });
    }
}

// partial[y]: sums over the rows y, y + gridDim.y ..., for 32 columns a block
__global__ void __launch_bounds__(256) norm_columns(const Problem p) {
    __shared__ float weights[8][33], biases[8][33];
    const int64_t c = int64_t{blockIdx.x} * 32 + threadIdx.x;
    float dw = 0.0f, db = 0.0f;
    const int64_t step = int64_t{gridDim.y} * blockDim.y;
    if (c < p.dim)
        for (int64_t row = int64_t{blockIdx.y} + int64_t{gridDim.y} * threadIdx.y; row < p.rows; row += step) {
            const Stats s = {p.stats[row], p.stats[p.rows + row], p.stats[2 * p.rows + row]};
            const float d = p.x.one(row * p.dim + c);
            dw = fmaf(d, s.normal(p.normed.one(row * p.dim + c)), dw);
            db += d;
        }
    weights[threadIdx.y][threadIdx.x] = dw, biases[threadIdx.y][threadIdx.x] = db;
    __syncthreads();
    if (threadIdx.y || c >= p.dim) return;
    for (int y = 1; y < 8; y++) dw += weights[y][threadIdx.x], db += biases[y][threadIdx.x];
    float* line = p.partial + int64_t{blockIdx.y} * (p.centred ? 2 : 1) * p.dim;
    line[c] = dw;
    if (p.centred) line[p.dim + c] = db;
}

// The lines of `partial`, added in their order by 16 threads a column and those in theirs.
template <class W>
__global__ void __launch_bounds__(512) norm_add_partial(const float* partial, int64_t lines, int64_t dim, int64_t width, W* dweight,
                                                       W* dbias) {
    __shared__ float sums[16][33];
    const int64_t c = int64_t{blockIdx.x} * 32 + threadIdx.x;
    float sum = 0.0f;
    if (c < width)
        for (int64_t i = threadIdx.y; i < lines; i += 16) sum += partial[i * width + c];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || c >= width) return;
    for (int y = 1; y < 16; y++) sum += sums[y][threadIdx.x];
    (c < dim ? dweight[c] : dbias[c - dim]) = from_float<W>(sum);
}

// ---- launching

int attribute(cudaDeviceAttr which) {
    int32_t device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, which, device);
    return value;
}

// After how many rows their alignment repeats.
int period(int64_t dim) { return dim % 8 == 0 ? 1 : dim % 4 == 0 ? 2 : dim % 2 == 0 ? 4 : 8; }

// Runs a kernel on groups of threads, several for a block where rows are short; false where its ring does not fit. `slots` of 16
// bytes hold a pack of a row; `lines`: how many groups there may be, and then how many there were.
template <auto KERNEL>
bool launch(int packs, int rows, Problem p, bool shift, int slots, int64_t& lines, cudaStream_t stream) {
    const int64_t columns = (p.dim + (shift ? 22 : 7)) / 8;
    const int64_t threads = ((columns + packs - 1) / packs + 31) / 32 * 32;
    if (threads > THREADS) return false;
    static const int registers = [] {  // of this kernel, on any chip
        cudaFuncAttributes found{};
        cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(KERNEL));
        return found.numRegs > 0 ? (found.numRegs + 7) / 8 * 8 : 96;
    }();
    int groups = threads < 512 ? min(static_cast<int>(512 / threads), 15) : 1;  // each has a barrier of its own, of fifteen
    while (shift && groups & (groups - 1)) groups--;
    const int block = static_cast<int>(threads) * groups;
    int resident = 65536 / (registers * block);
    const int each = 16 * slots * packs * rows * block;  // bytes of a stage
    const int whole = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 4096;
    int fit = 0;
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
    p.groups = lines = blocks * groups;
    const int bytes = each * p.stages;
    const auto kernel = reinterpret_cast<const void*>(KERNEL);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
    KERNEL<<<static_cast<unsigned>(blocks), dim3(static_cast<unsigned>(threads), groups), bytes, stream>>>(p);
    return true;
}

// The fastest of the kernels that there are whose ring fits: for half precision four rows at a time, for all else two packs of one.
#define MC_LAUNCH(kernel, dtype, ...)                                                                                  \
    [&] {                                                                                                              \
        MC_FOR_BOOL(p.centred, CENTRED,                                                                                \
            const bool half = dtype == BF16, known = half || (dtype == F16 && !shift);                                 \
            if (half && shift && launch<kernel<BF16, CENTRED, true, 1, 4>>(1, 4, __VA_ARGS__)) return true;            \
            if (half && !shift && launch<kernel<BF16, CENTRED, false, 1, 4>>(1, 4, __VA_ARGS__)) return true;          \
            if (half && !shift && launch<kernel<BF16, CENTRED, false, 1, 2>>(1, 2, __VA_ARGS__)) return true;          \
            if (half && !shift && launch<kernel<BF16, CENTRED, false, 2, 1>>(2, 1, __VA_ARGS__)) return true;          \
            if (known && !half && launch<kernel<F16, CENTRED, false, 1, 4>>(1, 4, __VA_ARGS__)) return true;           \
            if (shift) return launch<kernel<ANY, CENTRED, true, 2, 1>>(2, 1, __VA_ARGS__);                             \
            return launch<kernel<ANY, CENTRED, false, 2, 1>>(2, 1, __VA_ARGS__);)                                      \
    }()

int slots_of(const Tensor& tensor) { return tensor.data ? tensor.size() / 2 : 0; }
int threads_for(int64_t dim) {
    const int64_t wanted = (dim + 127) / 128 * 32;
    return static_cast<int>(wanted < 1024 ? wanted : 1024);
}

void forward(const Problem& p, bool shift, cudaStream_t stream) {
    int64_t lines = INT32_MAX;
    const int slots = slots_of(p.x) + slots_of(p.residual);
    const Dtype kind = p.residual.data ? p.residual.dtype : p.x.dtype;
    if (p.alike && MC_LAUNCH(norm_rows, kind, p, shift, slots, lines, stream)) return;
    const int threads = threads_for(p.dim);
    norm_any_rows<<<grid(p.rows, 1, 4096 / threads), threads, 0, stream>>>(p);
}

// How many lines of `partial` there are.
int64_t backward(const Problem& p, int64_t lines, bool shift, cudaStream_t stream) {
    const int slots = slots_of(p.x) + slots_of(p.normed) + slots_of(p.residual);
    if (p.alike && MC_LAUNCH(norm_rows_backward, p.normed.dtype, p, shift, slots, lines, stream)) return lines;
    const int threads = threads_for(p.dim);
    norm_any_rows_backward<<<grid(p.rows, 1, 4096 / threads), threads, 0, stream>>>(p);
    norm_columns<<<dim3(static_cast<unsigned>((p.dim + 31) / 32), static_cast<unsigned>(lines)), dim3(32, 8), 0, stream>>>(p);
    return lines;
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

}  // namespace

static void set_rate(Problem& p, const Array& seed, double rate) {
    p.seed = seed.as<int64_t>();
    p.threshold = static_cast<uint32_t>(rate * 65536 + 0.5);
    p.scale = p.threshold >= 65536 ? 0.0f : 65536.0f / (65536 - p.threshold);
}

MC_KERNEL(norm) {
    const Array x = call.in("x", FLOATS);
    const Shape rows{x.shape.rows()}, columns{x.shape.last()};
    const Array residual = call.maybe("residual", FLOATS, x.shape);
    const Array weight = call.in("weight", FLOATS, columns);
    const Array bias = call.maybe("bias", weight.dtype, columns);
    const double eps = call.real("eps");
    const bool centred = call.flag("centred");
    const Array seed = call.maybe("seed", I64, Shape{1});
    const double rate = call.real("p");
    const Array out = call.out("out", FLOATS, x.shape);
    const Array total = call.maybe_out("total", residual ? residual.dtype : x.dtype, x.shape);
    const Array stats = call.out("stats", F32, Shape{3, rows.at[0]});
    const bool adds = static_cast<bool>(residual);
    if (adds != static_cast<bool>(total)) call.refuse("a total is written where there is a residual, and only there");
    const Dtype source = residual ? residual.dtype : x.dtype;
    if (!known(x.dtype, source, out.dtype)) call.refuse("no kernel for this mixture of dtypes");
    call.ready();
    if (!rows.at[0] || !columns.at[0]) return;
    Problem p{};
    p.x = tensor(x), p.residual = tensor(residual), p.weight = tensor(weight), p.bias = tensor(bias);
    p.out = tensor(out), p.total = tensor(total), p.stats = stats.as<float>();
    p.eps = static_cast<float>(eps), p.centred = centred, p.alike = alike(out, total);
    p.rows = rows.at[0], p.dim = columns.at[0];
    set_rate(p, seed, rate);
    forward(p, !packed(p.dim, x, residual, out, total), static_cast<cudaStream_t>(call.stream));
}

MC_KERNEL(norm_backward) {
    const Array grad = call.in("grad", FLOATS);
    const Shape columns{grad.shape.last()};
    const Array total = call.in("total", FLOATS, grad.shape);
    const Array more = call.maybe("more", total.dtype, grad.shape);
    const Array weight = call.in("weight", FLOATS, columns);
    const Array stats = call.in("stats", F32, Shape{3, grad.shape.rows()});
    const Array seed = call.maybe("seed", I64, Shape{1});
    const double rate = call.real("p");
    const Array stream = call.out("stream", total.dtype, grad.shape);
    const Array branch = call.maybe_out("branch", FLOATS, grad.shape);
    const Array dweight = call.out("dweight", weight.dtype, columns);
    const Array dbias = call.maybe_out("dbias", weight.dtype, columns);
    const Array partial = call.inout("partial", F32);
    const int64_t dim = columns.at[0], lines = partial.shape.rank ? partial.shape.at[0] : 0;
    if (!(partial.shape == Shape{lines, dbias ? 2 : 1, dim}) || lines < 1 || lines > 65535)
        call.refuse("partial: 1 to 65535 lines of sums are wanted");
    if (!known(branch ? branch.dtype : total.dtype, total.dtype, grad.dtype)) call.refuse("no kernel for this mixture of dtypes");
    call.ready();
    if (!dim) return;
    Problem p{};
    p.x = tensor(grad), p.normed = tensor(total), p.residual = tensor(more), p.weight = tensor(weight);
    p.total = tensor(stream), p.out = tensor(branch), p.stats = stats.as<float>(), p.partial = partial.as<float>();
    p.centred = static_cast<bool>(dbias), p.alike = alike(stream, branch), p.rows = grad.shape.rows(), p.dim = dim;
    set_rate(p, seed, rate);
    const auto on = static_cast<cudaStream_t>(call.stream);
    const int64_t width = partial.shape.at[1] * dim;
    const int64_t used = p.rows ? backward(p, lines, !packed(dim, grad, total, more, stream, branch), on) : 0;
    MC_FOR_FLOAT(weight.dtype, W, norm_add_partial<W><<<static_cast<unsigned>((width + 31) / 32), dim3(32, 16), 0, on>>>(
        p.partial, used, dim, width, dweight.as<W>(), dbias.as<W>()))
}
