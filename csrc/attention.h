// What the kernels of attention with a relative bias share (attention.cu forward, attention_backward.cu): which rows a block reads,
// the bias, what is hidden, what is dropped.
//
// The bias is a function of the distance between key and query alone, a vector a head, so it is constant along the diagonals of a tile:
// a block keeps the I + J - 1 values of its I x J tile in shared memory (`strip`), and of the 8 M N scores of a thread in a product of
// 16 M x 8 N only 2 (2 M + N - 1) have one of their own, which is all that the loads cost. Where all of a tile is as far as the bias
// tells distances apart, or further (T5's is one number from 128 on), it is one number, which costs next to nothing.
#pragma once
#include "bulk.h"
#include "philox.h"
#include "wgmma.h"

namespace {

constexpr float LOG2E = 1.44269504088896341f;

// How a head of up to DIM channels lies in shared memory and is multiplied, and how much of it a block takes: WARPS warps of 16 M rows
// each, so that each matrix that it loads of the other side is used M times, and of the other side ACROSS rows at a time. Chosen for
// the registers (65,536 among the threads of BLOCKS blocks, 255 a thread) and for shared memory (99 KiB at most, and up to 64 channels
// the 64 KiB of Turing).
template <int CHANNELS>
struct Warps : Padded<CHANNELS> {
    using Padded<CHANNELS>::DIM;
    static constexpr bool TURNS = false;
    struct Forward {
        static constexpr int WARPS = 4, M = 2, ACROSS = DIM <= 96 ? 64 : 32, BLOCKS = 1;
    };
    struct OfKeys {  // two sums in registers
        static constexpr int WARPS = 4, M = DIM <= 64 ? 2 : 1, ACROSS = 32, BLOCKS = 1;
    };
    struct OfQueries {
        static constexpr int WARPS = 4, M = DIM <= 96 ? 2 : 1, ACROSS = 32, BLOCKS = 1;
    };
};

// The same of more channels on Turing, whose 64 KiB hold fewer rows of them. What two matrices stay for, backward, are 64 rows.
template <int CHANNELS>
struct Turing : Padded<CHANNELS> {
    static constexpr bool TURNS = false;
    struct Forward {
        static constexpr int WARPS = 4, M = 2, ACROSS = CHANNELS <= 96 ? 32 : 16, BLOCKS = 1;
    };
    struct OfKeys {
        static constexpr int WARPS = 4, M = 1, ACROSS = Forward::ACROSS, BLOCKS = 1;
    };
    using OfQueries = OfKeys;
};

// The same by Hopper's warpgroups, of which a block has one: several blocks that wait for nothing in common keep a multiprocessor busier
// than two warpgroups that share their keys and wait for each other at every tile (one H200, T5-large's forward: 120 and 124 microseconds).
template <int CHANNELS>
struct Groups : Grouped<CHANNELS> {
    static constexpr bool TURNS = CHANNELS <= 64;  // of_keys has the registers to do two things at once
    struct Forward {
        static constexpr int WARPS = 4, M = 1, ACROSS = 64, BLOCKS = CHANNELS <= 64 ? 4 : CHANNELS <= 96 ? 3 : 2;
    };
    struct OfKeys {
        static constexpr int WARPS = 4, M = 1, ACROSS = 64, BLOCKS = 2;
    };
    struct OfQueries {
        static constexpr int WARPS = 4, M = 1, ACROSS = 64, BLOCKS = CHANNELS <= 80 ? 3 : 2;
    };
};

// Of those a block's: L is one of the three.
template <class S, class L>
struct Block : L {
    static constexpr int THREADS = 32 * L::WARPS, N = L::ACROSS / 8, ROWS = 16 * L::M * L::WARPS, STRIP = ROWS + L::ACROSS;
    static constexpr size_t OWN = sizeof(uint16_t) * S::elements(ROWS), OTHER = sizeof(uint16_t) * S::elements(L::ACROSS);
};

template <class S>
constexpr bool OLD = std::is_same_v<S, Turing<S::DIM>>;  // for chips before Ampere alone

// Whether the chip that is compiled for has the instructions and the shared memory, and nothing better.
template <class T, class S>
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool ABLE = S::GROUP;
#elif defined(__CUDA_ARCH__)
constexpr bool ABLE = !S::GROUP && (__CUDA_ARCH__ >= 800 ? !OLD<S> : std::is_same_v<T, fp16> && (OLD<S> || S::DIM <= 64));
#else
constexpr bool ABLE = true;
#endif

// Positions within a sequence are 32 bits: a bias has one number for each distance. Elements are counted in 64.
struct Problem {
    const void *q, *k, *v;
    int64_t batch, s, t, heads, sequences, span, longest_q, longest_k, distances;
    int64_t numbers;  // of a head's bias: for each distance, and where there is a prompt for either way across its edge
    int32_t low, high;  // numbers of distances before and behind these are not read: what is further has the one or the other
    int32_t dim, prompt;  // 0: none
    const float* bias;  // (heads, numbers), or null
    const uint8_t* seen;  // (batch, t), or null
    const int32_t *ends_q, *ends_k;
    const int32_t* context;  // a sequence, or null
    const int64_t* seed;  // or null
    uint32_t threshold;
    float kept, scale;
    bool causal;
};

// One sequence of one head.
struct Sequence {
    int64_t q0, k0;  // the first of its rows in q and in k
    int64_t row;     // of b h s, the first
    int32_t s, t, head, dim;
    int32_t open;  // keys before this one are seen by all queries
    int64_t step;  // elements from a row to the next

    // `pair` counts the heads of the first sequence, then those of the next.
    __device__ Sequence(const Problem& p, uint32_t pair)
        : Sequence(p, pair / static_cast<uint32_t>(p.heads), pair % static_cast<uint32_t>(p.heads)) {}
    __device__ Sequence(const Problem& p, int64_t sequence, int64_t at_head) {
        const int64_t batch = p.ends_q ? 0 : sequence;
        int64_t first_q = 0, first_k = 0, last_q = p.s, last_k = p.t;
        if (p.ends_q) {  // what the tensors do not have is cut
            first_q = within(p.ends_q[sequence], 0, p.s), last_q = within(p.ends_q[sequence + 1], first_q, p.s);
            first_k = within(p.ends_k[sequence], 0, p.t), last_k = within(p.ends_k[sequence + 1], first_k, p.t);
        }
        q0 = batch * p.s + first_q, k0 = batch * p.t + first_k;
        row = (batch * p.heads + at_head) * p.s + first_q;
        s = static_cast<int32_t>(last_q - first_q), t = static_cast<int32_t>(last_k - first_k);
        head = static_cast<int32_t>(at_head), dim = p.dim, step = p.heads * p.dim;
        open = !p.causal ? t : p.context ? static_cast<int32_t>(within(p.context[sequence], 0, t)) : 0;
    }
    static __device__ int64_t within(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

    // The same where rows of `times` tensors lie side by side.
    __device__ __forceinline__ Sequence beside(int32_t times) const {
        Sequence found = *this;
        found.step *= times;
        return found;
    }
    template <class T>
    __device__ T* queries(T* of) const {
        return of + q0 * step + int64_t{head} * dim;
    }
    template <class T>
    __device__ T* keys(T* of) const {
        return of + k0 * step + int64_t{head} * dim;
    }
    // Query i sees the keys before this one: the queries are the last s of t positions.
    __device__ int32_t limit(int32_t i) const {
        const int32_t most = i + 1 + t - s < open ? open : i + 1 + t - s;
        return most < t ? most : t;
    }
    // The first query that sees a key of those from j on.
    __device__ int32_t viewer(int32_t j) const { return j < open || j < t - s ? 0 : j - (t - s); }
    // Of a tile of queries from i on and keys from j on some may be the prompt's where j, or i, is less than this one; then its rows and
    // columns are told apart.
    __device__ int32_t mixed_keys(const Problem& p, int32_t i) const { return p.prompt && i + t - s < p.prompt ? INT32_MAX : p.prompt; }
    __device__ int32_t mixed_queries(const Problem& p, int32_t j) const {
        return !p.prompt ? INT32_MIN : j < p.prompt ? INT32_MAX : p.prompt - (t - s);
    }
};

// ---- from global to shared memory

// Rows of a head, ROWS at a time, of COUNT matrices that lie alike; zeros for those past the last and for channels past `dim`. A thread
// has channels of its own, and rows a fixed number apart; it goes on from where it was: few instructions matter, for the tensor cores
// leave time for little else. Where the 16 bytes of a row are no power of two, those past one are a second part, shared out likewise.
template <int ROWS, int THREADS, class S, class T, int COUNT>
struct Feed {
    static constexpr int PACKS = S::DIM / 8, WIDE = S::GROUP || PACKS < 16 ? 8 : 16, REST = PACKS - WIDE;
    static constexpr int HOP = THREADS / WIDE, REST_HOP = REST ? THREADS / REST : ROWS;
    static_assert(ROWS % HOP == 0 && HOP % 8 == 0 && ROWS % REST_HOP == 0 && REST_HOP % 8 == 0);
    const T* next[COUNT];
    int32_t left, left_of_rest, to_rest;  // rows from there on; where the second part is
    int64_t step;

    template <class... From>
    __device__ __forceinline__ Feed(const Sequence& of, int32_t first, int32_t rows, From... from) : next{from...}, step(of.step) {
        const auto at = static_cast<int>(threadIdx.x);
        const int row = at / WIDE, channel = at % WIDE * 8, row_of_rest = at / (REST ? REST : 1), rest = (WIDE + at % (REST ? REST : 1)) * 8;
#pragma unroll
        for (int k = 0; k < COUNT; k++) next[k] += int64_t{first} * step + row * step + channel;
        left = channel < of.dim ? rows - first - row : 0;
        left_of_rest = rest < of.dim ? rows - first - row_of_rest : 0;
        to_rest = (row_of_rest - row) * static_cast<int32_t>(step) + rest - channel;
    }
    template <class... To>
    __device__ __forceinline__ void to(To... to) {
        T* const tiles[COUNT] = {to...};
        const auto at = static_cast<int>(threadIdx.x);
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            T* const place = tiles[k] + S::place(at / WIDE, at % WIDE * 8);
#pragma unroll
            for (int i = 0; i < ROWS; i += HOP) copy_async(reinterpret_cast<uint4*>(place + S::below(i, 0)), next[k] + i * step, i < left);
            if constexpr (REST > 0) {
                T* const other = tiles[k] + S::place(at / REST, (WIDE + at % REST) * 8);
#pragma unroll
                for (int i = 0; i < ROWS; i += REST_HOP)
                    copy_async(reinterpret_cast<uint4*>(other + S::below(i, WIDE * 8)), next[k] + to_rest + i * step, i < left_of_rest);
            }
            next[k] += ROWS * step;
        }
        left -= ROWS, left_of_rest -= ROWS;
    }
};

// Of a head's bias that of queries [i, i + I) and keys [j, ...) begins with this number, of the last query and the first key.
template <int I>
__device__ __forceinline__ int32_t number(const Problem& p, const Sequence& of, int32_t i, int32_t j) {
    return static_cast<int32_t>(p.longest_k - of.t + of.s - I) + j - i;
}
__device__ __forceinline__ int32_t read_for(const Problem& p, int32_t number) { return max(p.low, min(p.high, number)); }

// Of a row of tiles, of BY numbers each before the next one or behind it, those whose COUNT numbers are not all one: [begin, begin + count).
// With a prompt all are.
template <int COUNT, int BY>
struct Near {
    int32_t begin = INT32_MIN;
    uint32_t count = UINT32_MAX;

    __device__ __forceinline__ Near(const Problem& p, int32_t first) {
        if (!p.bias || p.prompt) return;
        constexpr int32_t STEP = BY < 0 ? -BY : BY;
        static_assert((STEP & (STEP - 1)) == 0);
        const int32_t from = BY < 0 ? first - p.high : p.low - first - COUNT + 1, to = BY < 0 ? first + COUNT - 1 - p.low : p.high - first;
        begin = (from & -STEP) / STEP + 1, count = max(0, ((to + STEP - 1) & -STEP) / STEP - begin);
    }
    __device__ __forceinline__ bool has(int32_t step) const { return static_cast<uint32_t>(step) - static_cast<uint32_t>(begin) < count; }
};

// The bias of queries [i, i + I) and keys [j, j + J): strip[key - query + I - 1]; then of those BY further on. Where it is one number the
// first place is enough.
template <int I, int J, int THREADS, int BY>
struct Strip {
    const float* const bias;
    int32_t first;

    __device__ __forceinline__ Strip(const Problem& p, const Sequence& of, int32_t i, int32_t j)
        : bias(p.bias ? p.bias + of.head * p.numbers : nullptr), first(number<I>(p, of, i, j)) {}
    __device__ __forceinline__ void to(const Problem& p, float* strip, bool one) {
        if (!bias) return;
#pragma unroll
        for (int hop = 0; hop < I + J - 1; hop += THREADS)
            if (hop + static_cast<int>(threadIdx.x) < (one ? 1 : I + J - 1))
                copy_async(strip + hop + threadIdx.x, bias + read_for(p, first + hop + static_cast<int32_t>(threadIdx.x)), true);
        first += BY;
    }
};

// ROWS numbers of `a`, then as many of `b`, zeros past the last; then the next.
template <int ROWS, int THREADS>
struct Numbers {
    static_assert(2 * ROWS <= THREADS);
    const float* next;
    int32_t left;

    __device__ __forceinline__ Numbers(const float* a, const float* b, int32_t first, int32_t rows)
        : next((threadIdx.x < ROWS ? a : b) + first + threadIdx.x % ROWS), left(rows - first - static_cast<int32_t>(threadIdx.x % ROWS)) {}
    __device__ __forceinline__ void to(float* place) {
        if (2 * ROWS == THREADS || threadIdx.x < 2 * ROWS) copy_async(place + threadIdx.x, next, left > 0);
        next += ROWS, left -= ROWS;
    }
};

// Shared memory from a multiple of BYTES on
template <int BYTES>
__device__ __forceinline__ char* aligned(uint4* memory) {
#ifdef MC_EMULATED
    const auto at = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(memory));
#else
    const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
#endif
    return reinterpret_cast<char*>(memory) + (BYTES - at % BYTES) % BYTES;
}

__device__ __forceinline__ void zero(float* x, int count) {
    for (int at = static_cast<int>(threadIdx.x); at < count; at += static_cast<int>(blockDim.x)) x[at] = 0.0f;
}

// ---- what becomes of a tile's products. This thread's element e of x[m][n] is in row 16 m + e / 2 * 8 + g and column 8 n + 2 c + e % 2.

__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
__device__ __forceinline__ int g() { return static_cast<int>(threadIdx.x % 32 / 4); }
__device__ __forceinline__ int c() { return static_cast<int>(threadIdx.x % 4); }

template <int M, int N, class F>
__device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) f(m, n, e);
}

// f(m, n, e, across, forth) for every element of a tile whose warps' first query is i and first key j: whether the two are on different
// sides of the prompt's edge, and whether the query is the prompt's. Rows are queries, or KEYS.
template <bool KEYS, int M, int N, class F>
__device__ __forceinline__ void each_side(const Problem& p, const Sequence& of, int32_t i, int32_t j, F f) {
    const int32_t query = p.prompt - (i + of.t - of.s), key = p.prompt - j;  // so many of the prompt from there on
    const int32_t row = (KEYS ? key : query) - g(), column = (KEYS ? query : key) - 2 * c();
    each<M, N>([&](int m, int n, int e) {
        const bool own = 16 * m + e / 2 * 8 < row, other = 8 * n + e % 2 < column;
        f(m, n, e, own != other, KEYS ? other : own);
    });
}

// Scores in units of log 2, for softmax is then a power of two, less what `base` says: x scale + bias - base(m, n, e). The tile's first
// query is i, its first key j. Rows are queries, or KEYS: `strip` goes the other way; where a tile is `far` its first number is that of all.
template <bool KEYS, int ROWS, int M, int N, class F>
__device__ __forceinline__ void score(float (&x)[M][N][4], const Problem& p, const Sequence& of, int32_t i, int32_t j, bool mixed, bool far,
                                      const float* strip, F base) {
    const int own = warp() * 16 * M, first = own + g() - 2 * c();
    if (!strip) return each<M, N>([&](int m, int n, int e) { x[m][n][e] = fmaf(x[m][n][e], p.scale, -base(m, n, e)); });
    if (far) {
        const float bias = *strip * LOG2E;
        return each<M, N>([&](int m, int n, int e) { x[m][n][e] = fmaf(x[m][n][e], p.scale, bias - base(m, n, e)); });
    }
    const float* at = KEYS ? strip + 8 * N - 1 + first : strip + ROWS - 1 - first;
    const auto ahead = [](int m, int n, int e) { return (KEYS ? 1 : -1) * (16 * m + e / 2 * 8 - 8 * n - e % 2); };
    if (mixed) {
        const float* const constants = p.bias + of.head * p.numbers + p.distances;
        const float to_text = constants[0], to_prompt = constants[1];
        return each_side<KEYS, M, N>(p, of, KEYS ? i : i + own, KEYS ? j + own : j, [&](int m, int n, int e, bool across, bool forth) {
            const float bias = across ? forth ? to_text : to_prompt : at[ahead(m, n, e)];
            x[m][n][e] = fmaf(x[m][n][e], p.scale, fmaf(bias, LOG2E, -base(m, n, e)));
        });
    }
    each<M, N>([&](int m, int n, int e) {
        x[m][n][e] = fmaf(x[m][n][e], p.scale, fmaf(at[ahead(m, n, e)], LOG2E, -base(m, n, e)));
    });
}

// Whether one of the keys [j, j + COUNT) of the sequence is not seen; most tiles have none, and nothing to hide. All of a warp ask.
template <int COUNT>
__device__ __forceinline__ bool padded(const Problem& p, const Sequence& of, int32_t j) {
    if (!p.seen) return false;
    bool whole = true;
#pragma unroll
    for (int i = 0; i < COUNT; i += 32) {
        const int32_t key = j + i + lane();
        whole &= key >= of.t || p.seen[of.k0 + key];
    }
    return __any_sync(0xFFFFFFFFu, !whole);
}

// A score of what is not there, or not seen, becomes -inf. The warp's first query is i, its first key j. Rows are queries, or KEYS.
template <bool KEYS, int M, int N>
__device__ __forceinline__ void hide(float (&x)[M][N][4], const Problem& p, const Sequence& of, int32_t i, int32_t j) {
    const int32_t row = (KEYS ? j : i) + g(), column = (KEYS ? i : j) + 2 * c();
    each<M, N>([&](int m, int n, int e) {
        const int32_t at = row + 16 * m + e / 2 * 8, across = column + 8 * n + e % 2;
        const bool hidden = KEYS ? (across >= of.s) | (at >= of.limit(across)) : across >= of.limit(at);
        x[m][n][e] = hidden ? -INFINITY : x[m][n][e];
    });
    if (!p.seen) return;
    const uint8_t* const seen = p.seen + of.k0;
#pragma unroll
    for (int k = 0; k < (KEYS ? 2 * M : 2 * N); k++) {
        const int32_t key = KEYS ? row + 8 * k : column + k / 2 * 8 + k % 2;
        const bool there = key < of.t && seen[key];
        each<M, N>([&](int m, int n, int e) {
            if ((KEYS ? 2 * m + e / 2 : 2 * n + e % 2) == k) x[m][n][e] = there ? x[m][n][e] : -INFINITY;
        });
    }
}

// Which of the keys [key, key + 8) a row of b h s keeps, as bits; key is a multiple of 8, so they are one counter.
__device__ __forceinline__ uint32_t eight(const Problem& p, uint64_t seed, int64_t row, int32_t key) {
    const Words words = philox((static_cast<uint64_t>(row) * p.span + key) / 8, seed);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) bits |= static_cast<uint32_t>(kept(words, i, p.threshold)) << i;
    return bits;
}

// f(m, n, e, kept) for every element. A counter is 8 keys of one row: each lane makes one of the 32 of four blocks of 8 x 8 and the
// others ask it for theirs. `row`: the first query of b h s, of the warp's rows or, where rows are KEYS, of the columns; `key` likewise.
template <bool KEYS, int M, int N, class F>
__device__ __forceinline__ void each_kept(const Problem& p, int64_t row, int32_t key, F f) {
    if (!p.seed) return each<M, N>([&](int m, int n, int e) { f(m, n, e, true); });
    const uint64_t seed = static_cast<uint64_t>(*p.seed);
    constexpr int A = 2 * M;
    static_assert(A * N % 4 == 0);
    uint32_t bits = 0;
#pragma unroll
    for (int block = 0; block < A * N; block++) {
        const int a = KEYS ? block % A : block / N, n = KEYS ? block / A : block % N;
        if (block % 4 == 0) {
            const int mine = block + lane() / 8;
            const int my_a = KEYS ? mine % A : mine / N, my_n = KEYS ? mine / A : mine % N;
            bits = eight(p, seed, row + 8 * (KEYS ? my_n : my_a) + lane() % 8, key + 8 * (KEYS ? my_a : my_n));
        }
        if (KEYS) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const uint32_t all = __shfl_sync(0xFFFFFFFFu, bits, block % 4 * 8 + 2 * c() + e);
                f(a / 2, n, a % 2 * 2 + e, (all >> g() & 1) != 0);
            }
        } else {
            const uint32_t all = __shfl_sync(0xFFFFFFFFu, bits, block % 4 * 8 + g());
#pragma unroll
            for (int e = 0; e < 2; e++) f(a / 2, n, a % 2 * 2 + e, (all >> (2 * c() + e) & 1) != 0);
        }
    }
}

// ---- results: the warp's rows, times a number each, by way of its own rows of a tile that it has done with

template <class S, int M, class T, class F>
__device__ __forceinline__ void put_rows(T* to, T* tile, const float (&sums)[M][S::TILES][4], const Sequence& of, int32_t first,
                                         int32_t rows, F factor) {
    const int own = warp() * 16 * M;
    __syncwarp();
    each<M, S::TILES>([&](int m, int n, int e) {
        if (e % 2) return;
        const float times = factor(2 * m + e / 2);
        *reinterpret_cast<uint32_t*>(tile + S::place(own + 16 * m + e / 2 * 8 + g(), 8 * n + 2 * c())) =
            pack2<T>(sums[m][n][e] * times, sums[m][n][e + 1] * times);
    });
    __syncwarp();
    constexpr int PACKS = S::DIM / 8;
    for (int at = lane(); at < 16 * M * PACKS; at += 32) {
        const int row = own + at / PACKS, channel = at % PACKS * 8;
        if (first + row < rows && channel < of.dim)
            *reinterpret_cast<uint4*>(to + (int64_t{first} + row) * of.step + channel) =
                *reinterpret_cast<const uint4*>(tile + S::place(row, channel));
    }
}

#ifdef MC_HOPPER
// ---- where Hopper's copy engine brings the tiles: heads of up to 64 channels, nothing dropped, no padding, no prompt

struct Maps {  // of q, k, v and, backward, the result's gradient
    Map q, k, v, grad;
};

// Rows of a tile from `rows` on are another sequence's, or nobody's: times a weight of zero they need not be zero. By a warpgroup, `group`
// of its block.
template <class S, class T>
__device__ __forceinline__ void clear(T* tile, int32_t rows, int group) {
    for (int at = static_cast<int>(threadIdx.x % 128); at < 64 * 8; at += 128)
        if (at / 8 >= rows) *reinterpret_cast<uint4*>(tile + S::place(at / 8, at % 8 * 8)) = make_uint4(0, 0, 0, 0);
    S::arrived();
    wait_for(1 + group, 128);
}

// The bias of ROWS queries from i on and `count` keys from j on, as Strip has it, in units of log 2; by THREADS threads. Not where it is one
// number for tiles of 64 x 64; the first of these numbers and the last stand before the others.
template <int THREADS, int ROWS>
__device__ __forceinline__ void lay_out(float* strip, const Problem& p, const Sequence& of, int32_t i, int32_t j, int32_t count) {
    const int32_t from = number<ROWS>(p, of, i, j), begin = max(0, p.low - 126 - from), end = min(ROWS + count - 1, p.high + 127 - from);
    const float* const bias = p.bias + of.head * p.numbers;
    const auto own = static_cast<int32_t>(threadIdx.x);
    if (own < 2) strip[own - 2] = bias[own ? p.high : p.low] * LOG2E;
#pragma unroll 4
    for (int32_t at = begin + own; at < end; at += THREADS) strip[at] = bias[read_for(p, from + at)] * LOG2E;
}
#endif

// ---- arguments

inline Problem read(Call& call, Array& q) {
    q = call.in("q", F16 | BF16);
    if (q.shape.rank != 4) call.refuse("q: %d dimensions; wanted 4", q.shape.rank);
    const Array k = call.in("k", q.dtype);
    if (k.shape.rank != 4) call.refuse("k: %d dimensions; wanted 4", k.shape.rank);
    const Array v = call.in("v", q.dtype, k.shape);
    Problem p{};
    if (!q.aligned() || !k.aligned() || !v.aligned()) call.refuse("q, k or v: not aligned to 16 bytes");
    p.q = q.data, p.k = k.data, p.v = v.data;
    p.batch = p.sequences = q.shape.at[0], p.s = q.shape.at[1], p.heads = q.shape.at[2], p.t = k.shape.at[1];
    if (k.shape.at[0] != p.batch || k.shape.at[2] != p.heads || k.shape.at[3] != q.shape.at[3])
        call.refuse("q and k differ in their batch, heads or head dim");
    if (q.shape.at[3] % 8 || q.shape.at[3] > 128 || !q.shape.at[3]) call.refuse("heads of 8 to 128 channels, in eights");
    p.dim = static_cast<int32_t>(q.shape.at[3]);
    if (p.s >= int64_t{1} << 30 || p.t >= int64_t{1} << 30) call.refuse("a sequence has less than 2^30 positions");
    const Array bias = call.maybe("bias", F32);
    const Array seen = call.maybe("seen", BOOL, Shape{p.batch, p.t});
    const Array ends_q = call.maybe("lengths_q", I32), ends_k = call.maybe("lengths_k", I32);
    const Array context = call.maybe("context", I32);
    p.longest_q = call.integer("longest_q", 0, p.s), p.longest_k = call.integer("longest_k", 0, p.t);
    p.prompt = static_cast<int32_t>(call.integer("prompt", 0, (int64_t{1} << 30) - 1));
    p.distances = p.longest_q + p.longest_k ? p.longest_q + p.longest_k - 1 : 0;
    p.numbers = p.distances + (p.prompt ? 2 : 0);
    const int64_t reach = call.integer("reach", 0, (int64_t{1} << 30) - 1), middle = p.longest_k - 1;
    p.low = static_cast<int32_t>(reach && middle > reach ? middle - reach : 0);
    p.high = static_cast<int32_t>(reach && middle + reach < p.distances ? middle + reach : p.distances - 1);
    if (bias && !(bias.shape == Shape{p.heads, p.numbers}))
        call.refuse("bias: wanted (heads, longest_q + longest_k - 1), a number for each distance, and with a prompt two more");
    if (ends_q.given != ends_k.given) call.refuse("lengths_q and lengths_k go together");
    if (ends_q) {
        p.sequences = ends_q.shape.count() - 1;
        if (p.batch != 1) call.refuse("packed sequences are one row; this is a batch of %lld", static_cast<long long>(p.batch));
        if (p.sequences < 0 || !(ends_q.shape == Shape{p.sequences + 1}) || !(ends_k.shape == ends_q.shape))
            call.refuse("lengths_q and lengths_k: one more than there are sequences, in both");
    } else if (p.longest_q != p.s || p.longest_k != p.t) {
        call.refuse("without lengths the longest sequences are all of q and of k");
    }
    if (context && !(context.shape == Shape{p.batch, p.sequences / (p.batch ? p.batch : 1)}))
        call.refuse("context: wanted (batch, sequences of a row), a number of keys for each");
    p.bias = p.numbers ? bias.as<float>() : nullptr, p.seen = seen.as<uint8_t>();
    p.ends_q = ends_q.as<int32_t>(), p.ends_k = ends_k.as<int32_t>(), p.context = context.as<int32_t>();
    p.scale = static_cast<float>(call.real("scale")) * LOG2E;
    p.causal = call.flag("causal");
    p.seed = call.maybe("seed", I64, Shape{1}).as<int64_t>();
    const double rate = call.real("p");
    if (!(rate >= 0 && rate <= 1)) call.refuse("p: wanted 0 to 1");
    const Rate of(rate);
    p.threshold = of.threshold, p.kept = p.seed ? of.scale : 1.0f;
    p.span = (p.longest_k + 127) / 128 * 128;
    return p;
}

// Launches `kernel` with so much shared memory; what the chip cannot do is refused.
template <class L, class... P, class... A>
void launch(Call& call, void (*kernel)(P...), int64_t blocks, A... args) {
    constexpr size_t shared = L::BYTES;
    int32_t device = 0, most = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (static_cast<size_t>(most) < shared) call.refuse("%d bytes of shared memory on this chip; wanted %d", most, static_cast<int32_t>(shared));
    if (blocks > INT32_MAX) call.refuse("more than 2^31 blocks");
    cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int32_t>(shared));
    kernel<<<static_cast<unsigned>(blocks), L::THREADS, shared, static_cast<cudaStream_t>(call.stream)>>>(args...);
}

// The chip, or Turing if it runs what was compiled for that: 90 is Hopper. Turing multiplies fp16 alone.
inline int check_chip(Call& call, Dtype dtype) {
    check_present(call, dtype);
    const int chip = chip_here();
    return modern(chip) ? chip : 75;
}

inline int64_t tiles(int64_t rows, int64_t each) { return (rows + each - 1) / each; }

}  // namespace

#ifdef MC_HOPPER  // there is code for sm_90a
constexpr int HOPPER = 90;
#else
constexpr int HOPPER = -1;
#endif
#ifdef MC_HOPPER
namespace {

// Whether Hopper's copy engine serves: then `maps` say where all is. `grad` may be null.
inline bool described(Maps& maps, int chip, const Problem& p, const void* grad = nullptr) {
    if (chip != HOPPER || p.dim > 64 || p.seed || p.seen || p.prompt || !p.t) return false;
    const int64_t queries = p.batch * p.s, keys = p.batch * p.t;
    if (queries > INT32_MAX || keys > INT32_MAX) return false;
    return describe(maps.q, p.q, queries, p.heads, p.dim) && describe(maps.k, p.k, keys, p.heads, p.dim) &&
           describe(maps.v, p.v, keys, p.heads, p.dim) && (!grad || describe(maps.grad, grad, queries, p.heads, p.dim));
}

}  // namespace
#endif

// Few sizes, for each is compiled six times: smaller heads are filled up with zeros.
#define MC_FOR_SIZES(chip, dim, S, ...)      \
    if (chip == HOPPER && dim <= 64) {       \
        using S = Groups<64>;                \
        __VA_ARGS__;                         \
    } else if (chip == HOPPER && dim <= 80) { \
        using S = Groups<80>;                \
        __VA_ARGS__;                         \
    } else if (chip == HOPPER && dim <= 96) { \
        using S = Groups<96>;                \
        __VA_ARGS__;                         \
    } else if (chip == HOPPER) {             \
        using S = Groups<128>;               \
        __VA_ARGS__;                         \
    } else if (dim <= 64) {                  \
        using S = Warps<64>;                 \
        __VA_ARGS__;                         \
    } else if (dim <= 96) {                  \
        using S = Warps<96>;                 \
        __VA_ARGS__;                         \
    } else {                                 \
        using S = Warps<128>;                \
        __VA_ARGS__;                         \
    }
#define MC_FOR_HALF(dtype, T, ...) \
    if (dtype == mc::BF16) {       \
        using T = bf16;            \
        __VA_ARGS__;               \
    } else {                       \
        using T = fp16;            \
        __VA_ARGS__;               \
    }
// Both, by what the chip can do; T and S are then names of the two.
#define MC_FOR_TILES(chip, dtype, dim, T, S, ...)                      \
    if (chip < 80 && dim > 64) {                                       \
        using T = fp16;                                                \
        if (dim <= 96) {                                               \
            using S = Turing<96>;                                      \
            __VA_ARGS__;                                               \
        } else {                                                       \
            using S = Turing<128>;                                     \
            __VA_ARGS__;                                               \
        }                                                              \
    } else {                                                           \
        MC_FOR_HALF(dtype, T, MC_FOR_SIZES(chip, dim, S, __VA_ARGS__)) \
    }
