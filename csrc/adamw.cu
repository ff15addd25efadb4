// AdamW on CUDA: unscale, clip, update and cast in one pass over all tensors of a call; the squared norm in another. The table of
// tensors goes to the device as arguments of small launches, so nothing on the host has to outlive the call and nothing waits. A
// block takes a chunk and finds its tensor in the table; the order of every sum is fixed.
#include "cuda.h"
#include "exact.h"
#include "philox.h"

#include "adamw.h"

namespace {

constexpr int THREADS = 256;

// ---- the table

constexpr int AT_ONCE = 40;  // items in the 4 KB of a launch's arguments
struct Some {
    Item items[AT_ONCE];
};

__global__ void fill(Item* table, const Some some, int64_t from, int count, const float* clip, const Numbers c) {
    const int i = threadIdx.x;
    if (i >= count) return;
    Item item = some.items[i];
    if (clip && clip[1] == clip[1]) tick(item, c, from + i);  // one thread alone knows of a step: no other reads it in this call
    table[from + i] = item;
}

// `item(i, first)`: the i-th item; returns the number of all pieces of `size` elements.
template <class F>
int64_t send(Item* table, int64_t count, int64_t size, const float* clip, const Numbers& c, cudaStream_t stream, F item) {
    int64_t pieces = 0;
    for (int64_t from = 0; from < count; from += AT_ONCE) {
        Some some;
        const int here = static_cast<int>(count - from < AT_ONCE ? count - from : AT_ONCE);
        for (int i = 0; i < here; i++) {
            some.items[i] = item(from + i, pieces);
            pieces += (some.items[i].n + size - 1) / size;
        }
        fill<<<1, AT_ONCE, 0, stream>>>(table, some, from, here, clip, c);
    }
    return pieces;
}

// The item that a piece belongs to, the last one whose first piece is not after it; a whole warp looks at 32 places at a time.
__device__ __forceinline__ const Item& find(const Item* table, int64_t count, int64_t piece) {
    int64_t low = 0, left = count;
    while (left > 1) {
        const int64_t stride = (left + 31) / 32, mine = (threadIdx.x % 32) * stride;
        const bool before = mine < left && table[low + mine].first <= piece;
        const int64_t skip = (__popc(__ballot_sync(0xFFFFFFFFu, before)) - 1) * stride;
        low += skip;
        left = left - skip < stride ? left - skip : stride;
    }
    return table[low];
}

// ---- four elements of one thread as 32-bit words, moved at once where all arrays of the item are aligned to that

template <class T>
struct Four {
    uint32_t words[sizeof(T)];
};
template <class T>
using Word = typename std::conditional<sizeof(T) == 4, uint32_t, typename std::conditional<sizeof(T) == 2, uint16_t, uint8_t>::type>::type;

template <class T>
__device__ __forceinline__ Four<T> load4(const T* p) {
    if constexpr (sizeof(T) == 4) {
        const uint4 found = *reinterpret_cast<const uint4*>(p);
        return {{found.x, found.y, found.z, found.w}};
    } else if constexpr (sizeof(T) == 2) {
        const uint2 found = *reinterpret_cast<const uint2*>(p);
        return {{found.x, found.y}};
    } else {
        return {{*reinterpret_cast<const uint32_t*>(p)}};
    }
}
template <class T>
__device__ __forceinline__ void store4(T* p, const Four<T>& four) {
    const uint32_t* const w = four.words;
    // an assignment would be taken apart
    if constexpr (sizeof(T) == 4) __stwb(reinterpret_cast<uint4*>(p), make_uint4(w[0], w[1], w[2], w[3]));
    else if constexpr (sizeof(T) == 2) __stwb(reinterpret_cast<uint2*>(p), make_uint2(w[0], w[1]));
    else __stwb(reinterpret_cast<uint32_t*>(p), w[0]);
}
// Those of the four that there are, one by one.
template <class T>
__device__ __forceinline__ Four<T> load_some(const T* p, int count) {
    Four<T> four{};
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (k < count)
            four.words[k * sizeof(T) / 4] |= uint32_t{reinterpret_cast<const Word<T>*>(p)[k]} << (k * sizeof(T) % 4 * 8);
    return four;
}
template <class T>
__device__ __forceinline__ void store_some(T* p, const Four<T>& four, int count) {
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (k < count) reinterpret_cast<Word<T>*>(p)[k] = static_cast<Word<T>>(four.words[k * sizeof(T) / 4] >> (k * sizeof(T) % 4 * 8));
}
template <class T>
__device__ __forceinline__ bool fits(const void* p) {
    return reinterpret_cast<uintptr_t>(p) % (4 * sizeof(T)) == 0;
}

__device__ __forceinline__ float number(const Four<float>& four, int k) { return __uint_as_float(four.words[k]); }
__device__ __forceinline__ float number(const Four<bf16>& four, int k) {
    return __uint_as_float(k % 2 ? four.words[k / 2] & 0xFFFF0000u : four.words[k / 2] << 16);
}
__device__ __forceinline__ float number(const Four<fp16>& four, int k) {
    return to_float(fp16{static_cast<uint16_t>(four.words[k / 2] >> (k % 2 * 16))});
}

// To the nearest.
template <class T>
__device__ __forceinline__ Four<T> nearest(const float x[4]) {
    Four<T> four;
#pragma unroll
    for (int k = 0; k < 4; k += 4 / sizeof(T)) {
        if constexpr (sizeof(T) == 4) four.words[k] = __float_as_uint(x[k]);
        else four.words[k / 2] = pack2<T>(x[k], x[k + 1]);
    }
    return four;
}
// Up or down, as 16 random bits have it, as in optim/adamw.py; a NaN has none but its highest places.
template <class T>
__device__ __forceinline__ Four<T> rounded(const float x[4], const uint32_t random[4], bool stochastic) {
    if constexpr (sizeof(T) == 2)
        if (stochastic) {
            Four<T> four;
#pragma unroll
            for (int k = 0; k < 4; k += 2)
                four.words[k / 2] = __byte_perm(__float_as_uint(x[k]) + random[k], __float_as_uint(x[k + 1]) + random[k + 1], 0x7632);
            return four;
        }
    return nearest<T>(x);
}

// Whether `update` of these numbers never leaves what Quick's functions say of themselves, but for NaN.
__device__ __forceinline__ bool quick_enough(const Numbers& c, const Item& item) {
    return c.eps >= 0x1p-57f && c.eps <= 0x1p40f && item.root <= 0x1p12f;
}

// ---- 8-bit moments

__device__ __forceinline__ float byte_of(uint32_t word, int k) {  // 2^23 and the byte
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540u + k));
}
__device__ __forceinline__ float number(const Four<int8_t>& four, int k) {
    return byte_of(four.words[0] ^ 0x80808080u, k) - 8388736.0f;
}
__device__ __forceinline__ float number(const Four<uint8_t>& four, int k) { return byte_of(four.words[0], k) - 8388608.0f; }
// Whole numbers from -128 to 255 as bytes.
__device__ __forceinline__ uint32_t bytes_of(const float x[4]) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; k++) words[k] = __float_as_uint(x[k] + 12582912.0f);  // 3 * 2^22
    return __byte_perm(__byte_perm(words[0], words[1], 0x0040), __byte_perm(words[2], words[3], 0x0040), 0x5410);
}

template <bool FOURTH>
__device__ __forceinline__ float decoded(float code) {  // with its sign
    const float x = code * (FOURTH ? static_cast<float>(1.0 / 255) : static_cast<float>(1.0 / 127));
    return FOURTH ? (x * x) * (x * x) : x * fabsf(x);
}
// The code's magnitude. `part`: that of x in the scale.
template <bool FOURTH, class Exact>
__device__ __forceinline__ float encoded(float x, float part, float chance, const Exact& exact) {
    const float root = exact.root(part), high = FOURTH ? exact.root(root) * 255.0f : root * 127.0f;
    const float low = __fadd_rd(high, 8388608.0f) - 8388608.0f;  // rounded down to a whole number
    const float below = decoded<FOURTH>(low), above = decoded<FOURTH>(low + 1.0f);
    const float code = (part - below) * 65536.0f > (above - below) * chance ? low + 1.0f : low;
    if (FOURTH) return x > 0 ? fminf(fmaxf(code, 2.0f), 255.0f) : code;
    return code > 127.0f ? 127.0f : code;
}
// Four codes of each moment; the scales are the largest magnitudes of the warp.
__device__ __forceinline__ uint32_t warp_max(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xFFFFFFFFu, x);
#else
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, lane));
    return x;
#endif
}
template <bool FOURTH, class T>
__device__ __forceinline__ float encode(Four<T>& codes, const float x[4], const float chance[4]) {
    float top = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) top = fmaxf(top, fabsf(x[k]));
    uint32_t bits = __float_as_uint(top);
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (x[k] != x[k]) bits = 0x7FC00000u;
    const float scale = __uint_as_float(warp_max(bits));  // the order of what has no sign is that of its bits; NaN is above all
    float found[4];
    if (scale == 0 || (scale >= 0x1p-64f && scale <= 0x1p40f)) {
        const float lifted = scale * 0x1p64f, inverse = scale > 0 ? Quick::inverse(lifted) : 0.0f;
#pragma unroll
        for (int k = 0; k < 4; k++)
            found[k] = encoded<FOURTH>(x[k], Quick::divided(fabsf(x[k]) * 0x1p64f, lifted, inverse), chance[k], Quick());
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
            found[k] = encoded<FOURTH>(x[k], scale < INFINITY ? fabsf(x[k]) / scale : 0.0f, chance[k], Plain());
    }
#pragma unroll
    for (int k = 0; k < 4; k++) found[k] = FOURTH ? found[k] : copysignf(found[k], x[k]);
    codes.words[0] = bytes_of(found);
    return scale;
}

// ---- the update

template <class P, class G, class M>
struct Elements {  // four of one thread, as they are stored
    using V = typename std::conditional<sizeof(M) == 1, uint8_t, M>::type;
    Four<P> p;
    Four<G> g;
    Four<M> m;
    Four<V> v;
    float m_scale, v_scale;
};

template <class P, class G, class M>
__global__ void __launch_bounds__(THREADS, 4)
    update_all(const Item* table, int64_t count, const float* clip, const Numbers c, bool half_copy) {
    using V = typename Elements<P, G, M>::V;
    constexpr bool CODED = sizeof(M) == 1, DRAWN = sizeof(M) < 4 || sizeof(P) < 4;
    const float factor = clip[1];
    if (factor != factor) return;
    const Item item = find(table, count, blockIdx.x);
    const int64_t begin = (blockIdx.x - item.first) * CHUNK;
    const int n = static_cast<int>(item.n - begin < CHUNK ? item.n - begin : CHUNK);
    P* const p = static_cast<P*>(item.p) + begin;
    const G* const g = static_cast<const G*>(item.g) + begin;
    M* const m = static_cast<M*>(item.m) + begin;
    V* const v = static_cast<V*>(item.v) + begin;
    bf16* const copy = item.copy ? static_cast<bf16*>(item.copy) + begin : nullptr;  // or fp16
    const bool vector = fits<P>(p) && fits<G>(g) && fits<M>(m) && fits<V>(v) && fits<bf16>(copy);
    const bool quick = quick_enough(c, item);
    // The four elements of a thread from i on; a warp's 128 are those that share the scale of an 8-bit moment.
    const auto read = [&](int i) {
        Elements<P, G, M> e;
        const int some = n - i;
        if (vector && some >= 4) {
            e.p = load4(p + i), e.g = load4(g + i), e.m = load4(m + i), e.v = load4(v + i);
        } else {
            e.p = load_some(p + i, some), e.g = load_some(g + i, some);
            e.m = load_some(m + i, some), e.v = load_some(v + i, some);
        }
        e.m_scale = CODED && some > 0 ? item.m_scale[(begin + i) / BLOCK8] : 0.0f;
        e.v_scale = CODED && some > 0 ? item.v_scale[(begin + i) / BLOCK8] : 0.0f;
        return e;
    };
    const auto write = [&](int i, Elements<P, G, M>& e) {
        float xs[4], ys[4], zs[4];
        const auto compute = [&](const auto& exact) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                xs[k] = number(e.p, k), ys[k] = number(e.m, k), zs[k] = number(e.v, k);
                if (CODED) ys[k] = decoded<false>(ys[k]) * e.m_scale, zs[k] = decoded<true>(zs[k]) * e.v_scale;
                update(xs[k], ys[k], zs[k], number(e.g, k), factor, c, item, exact);
            }
        };
        compute(Quick());
        float least = fabsf(xs[0]), nothing = 0;  // of a larger one no ratio that is denormal changes a place
#pragma unroll
        for (int k = 0; k < 4; k++) least = fminf(least, fabsf(xs[k])), nothing = __fmaf_rn(xs[k], 0.0f, nothing);
        if (!(quick && least >= 0x1p-99f && nothing == 0)) {
            compute(Plain());
#pragma unroll
            for (int k = 0; k < 4; k++)  // NaNs that may be added to
                for (float* x : {xs + k, ys + k, zs + k}) *x = *x != *x ? __uint_as_float(0x7FC00000u) : *x;
        }
        const int some = n - i;
        if (CODED && some < 4)
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (k >= some) ys[k] = zs[k] = 0;  // zero times a scale may be NaN
        Words random{};
        if (DRAWN && c.stochastic) random = philox(static_cast<uint64_t>(begin) / 4 | static_cast<uint32_t>(i) / 4, item.key);
        uint32_t of_p[4], of_m[4], of_v[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            of_p[k] = bits_of_p(random.w[k]), of_m[k] = bits_of_m(random.w[k]), of_v[k] = bits_of_v(random.w[k]);
        if constexpr (CODED) {
            float below[4], above[4];  // chances
#pragma unroll
            for (int k = 0; k < 4; k++) {  // 2^23 and the bits, or a half
                below[k] = c.stochastic ? __uint_as_float(0x4B000000u | of_m[k]) - 8388607.5f : 32768.0f;
                above[k] = c.stochastic ? __uint_as_float(0x4B000000u | of_v[k]) - 8388607.5f : 32768.0f;
            }
            const float m_scale = encode<false>(e.m, ys, below), v_scale = encode<true>(e.v, zs, above);
            if (threadIdx.x % 32 == 0 && some > 0)
                item.m_scale[(begin + i) / BLOCK8] = m_scale, item.v_scale[(begin + i) / BLOCK8] = v_scale;
        } else {
            e.m = rounded<M>(ys, of_m, c.stochastic), e.v = rounded<V>(zs, of_v, c.stochastic);
        }
        e.p = rounded<P>(xs, of_p, c.stochastic);
        Four<bf16> halves{};
        if (sizeof(P) == 4 && copy) {
            const Four<fp16> fp16s = nearest<fp16>(xs);
            halves = nearest<bf16>(xs);
            if (half_copy) halves.words[0] = fp16s.words[0], halves.words[1] = fp16s.words[1];
        }
        if (vector && some >= 4) {
            store4(p + i, e.p), store4(m + i, e.m), store4(v + i, e.v);
            if (sizeof(P) == 4 && copy) store4(copy + i, halves);
        } else {
            store_some(p + i, e.p, some), store_some(m + i, e.m, some), store_some(v + i, e.v, some);
            if (sizeof(P) == 4 && copy) store_some(copy + i, halves, some);
        }
    };
    const int lane = threadIdx.x % 32 * 4;  // the loop runs for whole warps, which the 8-bit scales need
    int warp = threadIdx.x / 32 * 128;
    if (warp >= n) return;
    Elements<P, G, M> e = read(warp + lane);
    for (; warp < n; warp += 4 * THREADS) {
        const Elements<P, G, M> next = warp + 4 * THREADS < n ? read(warp + 4 * THREADS + lane) : e;  // on their way meanwhile
        write(warp + lane, e);
        e = next;
    }
}

// ---- the norm

__device__ __forceinline__ double block_sum(double x) {
    __shared__ double warps[32];
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lane);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    double total = 0;
    for (int i = 0; i < static_cast<int>(blockDim.x) / 32; i++) total += warps[i];
    return total;
}

// A thread's sum of squares of a piece, in eight of kind S.
template <class S, class G>
__device__ __forceinline__ double added(const G* g, int32_t n) {
    constexpr int UNROLLED = sizeof(S) == 4 ? 4 : 1;  // the rare one takes no registers of the other
    S sums[8] = {};
    const auto square = [](G x) { return S{to_float(x)} * S{to_float(x)}; };
    if (reinterpret_cast<uintptr_t>(g) % 16 == 0) {
#pragma unroll UNROLLED
        for (int32_t i = threadIdx.x * 8; i < n; i += 8 * THREADS) {
            const Pack<G> pack = load8<true>(g + i, n - i < 8 ? n - i : 8);
#pragma unroll
            for (int k = 0; k < 8; k++) sums[k] += square(pack.at[k]);
        }
    } else {
#pragma unroll UNROLLED
        for (int32_t i = threadIdx.x; i < n; i += THREADS) sums[0] += square(g[i]);
    }
    double sum = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) sum += sums[k];
    return sum;
}

// In fp32 within a thread, at most 16 squares to a sum, and in fp64 from there on; again all in fp64 where one of them overflows.
template <class G>
__global__ void __launch_bounds__(THREADS) squares(const Item* table, int64_t count, double* partial) {
    const Item& item = find(table, count, blockIdx.x);
    const int64_t begin = (blockIdx.x - item.first) * PIECE;
    const int32_t n = static_cast<int32_t>(item.n - begin < PIECE ? item.n - begin : PIECE);
    const G* const g = static_cast<const G*>(item.g) + begin;
    double sum = added<float>(g, n);
    if (!(sum < INFINITY)) sum = added<double>(g, n);
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void add(const double* partial, int64_t n, double* total) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total = sum;
}

__global__ void judge(float* clip, const double* totals, int64_t n, const float* scale, float max_norm) {
    verdict(clip, totals, n, scale, max_norm);
}

}  // namespace

MC_KERNEL(adamw_squares) {
    const SquaresArguments given(call);
    call.ready();
    const auto stream = static_cast<cudaStream_t>(call.stream);
    Item* const table = given.table.as<Item>();
    send(table, given.grads.n, PIECE, nullptr, Numbers{}, stream, [&](int64_t i, int64_t first) { return given.item(i, first); });
    if (given.pieces) {
        MC_FOR_FLOAT(given.grads.dtype, G,
            squares<G><<<static_cast<unsigned>(given.pieces), THREADS, 0, stream>>>(table, given.grads.n, given.partial.as<double>()))
    }
    add<<<1, 1024, 0, stream>>>(given.partial.as<double>(), given.pieces, given.total.as<double>());
}

MC_KERNEL(adamw_clip) {
    const ClipArguments a(call);
    call.ready();
    judge<<<1, 1, 0, static_cast<cudaStream_t>(call.stream)>>>(a.clip.as<float>(), a.totals.as<double>(), a.totals.shape.count(),
                                                               a.scale.as<float>(), a.max_norm);
}

MC_KERNEL(adamw) {
    const Arguments given(call, F32 | BF16 | I8);
    call.ready();
    const auto stream = static_cast<cudaStream_t>(call.stream);
    const Numbers c = given.numbers;
    const float* const clip = given.clip.as<float>();
    Item* const table = given.table.as<Item>();
    send(table, given.p.n, CHUNK, clip, c, stream, [&](int64_t i, int64_t first) { return given.item(i, first); });
    if (!given.chunks) return;
    const unsigned blocks = static_cast<unsigned>(given.chunks);
    const bool half = given.copy.dtype == F16;
    MC_FOR_FLOAT(given.g.dtype, G, MC_FOR_BOOL(given.p.dtype == F32, WIDE,
        using P = typename std::conditional<WIDE || std::is_same<G, fp16>::value, float, bf16>::type;  // bf16 has no fp16 gradient
        if (given.m.dtype == I8)
            update_all<P, G, int8_t><<<blocks, THREADS, 0, stream>>>(table, given.p.n, clip, c, half);
        else if (given.m.dtype == BF16)
            update_all<P, G, bf16><<<blocks, THREADS, 0, stream>>>(table, given.p.n, clip, c, half);
        else
            update_all<P, G, float><<<blocks, THREADS, 0, stream>>>(table, given.p.n, clip, c, half);
    ))
}
