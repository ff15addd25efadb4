// AdamW on CUDA: unscale, clip, update and cast in one pass over all tensors of a call; the squared norm in another. The table of
// tensors goes to the device as arguments of small launches, so nothing on the host has to outlive the call and nothing waits. A
// block takes a chunk and finds its tensor in the table; the order of every sum is fixed.
#include "cuda.h"
#include "philox.h"

namespace {

MC_BOTH float square_root(float x) { return sqrtf(x); }

}  // namespace

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

// ---- four elements of one thread, moved at once where all arrays of the item are aligned to that

template <class T>
struct alignas(4 * sizeof(T)) Four {
    T at[4];
};
template <class T>
__device__ __forceinline__ Four<T> load4(const T* p, bool vector, int count) {
    if (vector && count == 4) return *reinterpret_cast<const Four<T>*>(p);
    Four<T> four{};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < count) four.at[i] = p[i];
    return four;
}
template <class T>
__device__ __forceinline__ void store4(T* p, const Four<T>& four, bool vector, int count) {
    if (vector && count == 4) {
        *reinterpret_cast<Four<T>*>(p) = four;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < count) p[i] = four.at[i];
}
template <class T>
__device__ __forceinline__ bool fits(const void* p) {
    return reinterpret_cast<uintptr_t>(p) % (4 * sizeof(T)) == 0;
}

// ---- roundings, as in optim/adamw.py

__device__ __forceinline__ bf16 round_at_random(float x, uint32_t random) {
    const uint32_t u = __float_as_uint(x);
    return __ushort_as_bfloat16(static_cast<unsigned short>(x != x ? u >> 16 | 0x40u : (u + random) >> 16));
}
template <class T>
__device__ __forceinline__ T rounded(float x, uint32_t random, bool stochastic) {
    if constexpr (sizeof(T) == 2)
        if (stochastic) return round_at_random(x, random);
    return from_float<T>(x);
}

template <bool FOURTH>
__device__ __forceinline__ float decoded(float code) {
    const float x = code * (FOURTH ? static_cast<float>(1.0 / 255) : static_cast<float>(1.0 / 127));
    return FOURTH ? (x * x) * (x * x) : x * x;
}
template <bool FOURTH>
__device__ __forceinline__ float encoded(float x, float scale, float chance) {  // the code's magnitude
    const float part = scale > 0 ? fabsf(x) / scale : 0.0f;
    const float low = floorf(FOURTH ? sqrtf(sqrtf(part)) * 255.0f : sqrtf(part) * 127.0f);
    const float below = decoded<FOURTH>(low), above = decoded<FOURTH>(low + 1);
    const float code = low + ((part - below) * 65536.0f > (above - below) * chance ? 1.0f : 0.0f);
    if (FOURTH) return part > 0 ? fminf(fmaxf(code, 2.0f), 255.0f) : code;
    return code > 127.0f ? 127.0f : code;  // NaN, of what is not finite, stays and is stored as 0
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
__global__ void __launch_bounds__(THREADS, sizeof(P) == 4 && sizeof(M) > 1 ? 4 : 3)
    update_all(const Item* table, int64_t count, const float* clip, const Numbers c, bool half_copy) {
    using V = typename Elements<P, G, M>::V;
    constexpr bool CODED = sizeof(M) == 1;
    const float factor = clip[1];
    if (factor != factor) return;
    const Item item = find(table, count, blockIdx.x);
    const int64_t begin = (blockIdx.x - item.first) * CHUNK;
    const int n = static_cast<int>(item.n - begin < CHUNK ? item.n - begin : CHUNK);
    P* const p = static_cast<P*>(item.p) + begin;
    const G* const g = static_cast<const G*>(item.g) + begin;
    M* const m = static_cast<M*>(item.m) + begin;
    V* const v = static_cast<V*>(item.v) + begin;
    uint16_t* const copy = item.copy ? static_cast<uint16_t*>(item.copy) + begin : nullptr;
    const bool vector = fits<P>(p) && fits<G>(g) && fits<M>(m) && fits<V>(v) && fits<uint16_t>(copy);
    // The four elements of a thread from i on; a warp's 128 are those that share the scale of an 8-bit moment.
    const auto read = [&](int i) {
        Elements<P, G, M> e;
        const int some = n - i < 4 ? n - i : 4;
        e.p = load4(p + i, vector, some), e.g = load4(g + i, vector, some);
        e.m = load4(m + i, vector, some), e.v = load4(v + i, vector, some);
        if (CODED && i < n) e.m_scale = item.m_scale[(begin + i) / BLOCK8], e.v_scale = item.v_scale[(begin + i) / BLOCK8];
        return e;
    };
    const auto write = [&](int i, Elements<P, G, M>& e) {
        const int some = n - i < 4 ? n - i : 4;
        Words random{}, other{};
        if (CODED || (c.stochastic && sizeof(M) == 2)) random = philox((begin + i) / 4, item.key);
        if (c.stochastic && sizeof(P) == 2) other = philox((begin + i) / 4, item.key ^ OTHER);
        Four<uint16_t> halves;
        float ys[4], zs[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float x = to_float(e.p.at[k]);
            if constexpr (CODED) {
                const float code = static_cast<float>(e.m.at[k]), size = decoded<false>(fabsf(code)) * e.m_scale;
                ys[k] = code < 0 ? -size : size;
                zs[k] = decoded<true>(static_cast<float>(e.v.at[k])) * e.v_scale;
            } else {
                ys[k] = to_float(e.m.at[k]), zs[k] = to_float(e.v.at[k]);
            }
            update(x, ys[k], zs[k], to_float(e.g.at[k]), factor, c, item);
            e.p.at[k] = rounded<P>(x, other.w[k] & 0xFFFFu, c.stochastic);
            halves.at[k] = half_copy ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
        }
        if constexpr (CODED) {
            float top = 0, top_squared = 0;
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (k < some) top = fmaxf(top, fabsf(ys[k])), top_squared = fmaxf(top_squared, zs[k]);
            top = warp_max(top), top_squared = warp_max(top_squared);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float low = c.stochastic ? static_cast<float>(random.w[k] & 0xFFFFu) + 0.5f : 32768.0f;
                const float high = c.stochastic ? static_cast<float>(random.w[k] >> 16) + 0.5f : 32768.0f;
                const int code = static_cast<int>(encoded<false>(ys[k], top, low));
                e.m.at[k] = static_cast<M>(ys[k] < 0 ? -code : code);
                e.v.at[k] = static_cast<V>(static_cast<int>(encoded<true>(zs[k], top_squared, high)));
            }
            if (threadIdx.x % 32 == 0 && i < n)
                item.m_scale[(begin + i) / BLOCK8] = top, item.v_scale[(begin + i) / BLOCK8] = top_squared;
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                e.m.at[k] = rounded<M>(ys[k], random.w[k] & 0xFFFFu, c.stochastic);
                e.v.at[k] = rounded<V>(zs[k], random.w[k] >> 16, c.stochastic);
            }
        }
        store4(p + i, e.p, vector, some);
        store4(m + i, e.m, vector, some);
        store4(v + i, e.v, vector, some);
        if (copy) store4(copy + i, halves, vector, some);
    };
    const int lanes = threadIdx.x % 32 * 4;  // the loop runs for whole warps, which the 8-bit scales need
    for (int warp = threadIdx.x / 32 * 128; warp < n; warp += 2 * 4 * THREADS) {
        const int i = warp + lanes, j = i + 4 * THREADS;
        Elements<P, G, M> first = read(i), second = read(j);
        write(i, first);
        if (warp + 4 * THREADS < n) write(j, second);
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

// In fp32 within a thread, at most 16 squares to a sum, in fp64 from there on.
template <class G>
__global__ void __launch_bounds__(THREADS) squares(const Item* table, int64_t count, double* partial) {
    const Item& item = find(table, count, blockIdx.x);
    const int64_t begin = (blockIdx.x - item.first) * PIECE;
    const int32_t n = static_cast<int32_t>(item.n - begin < PIECE ? item.n - begin : PIECE);
    const G* const g = static_cast<const G*>(item.g) + begin;
    float sums[8] = {};
    if (reinterpret_cast<uintptr_t>(g) % 16 == 0) {
#pragma unroll 4
        for (int32_t i = threadIdx.x * 8; i < n; i += 8 * THREADS) {
            const Pack<G> pack = load8<true>(g + i, n - i < 8 ? n - i : 8);
#pragma unroll
            for (int k = 0; k < 8; k++) sums[k] += to_float(pack.at[k]) * to_float(pack.at[k]);
        }
    } else {
#pragma unroll 4
        for (int32_t i = threadIdx.x; i < n; i += THREADS) {
            const float x = to_float(g[i]);
            sums[0] += x * x;
        }
    }
    double sum = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) sum += sums[k];
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
    const Array clip = call.out("clip", F32, Shape{2});
    const Array totals = call.in("totals", F64);
    const Array scale = call.maybe("scale", F32, Shape{1});
    const double most = call.real("max_norm");
    call.ready();
    judge<<<1, 1, 0, static_cast<cudaStream_t>(call.stream)>>>(clip.as<float>(), totals.as<double>(), totals.shape.count(),
                                                               scale.as<float>(), static_cast<float>(most));
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
