// Activations with a bias added first, act(x + bias), and gated ones, act(gate) * up; the backward computes all of it again.
//
// Elements are taken as they lie, eight or sixteen a thread, whatever the rows; only where a bias wants its gradient a thread keeps eight columns,
// walks down the rows and adds up in registers. Its part of the rows (`partial`, first axis: how many depends on the shape alone)
// ends in a row of fp32 sums; a second kernel adds the parts in their order.
#include "cuda.h"
#include "ptx.h"

namespace {

// NaN if x is
__device__ __forceinline__ float least(float limit, float x) {
#if __CUDA_ARCH__ >= 800
    float out;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(x), "f"(limit));
    return out;
#else
    return x > limit ? limit : x;
#endif
}
__device__ __forceinline__ float most(float limit, float x) {
#if __CUDA_ARCH__ >= 800
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(x), "f"(limit));
    return out;
#else
    return x < limit ? limit : x;
#endif
}
__device__ __forceinline__ float magnitude(float x) { return fabsf(x); }

// e^-x for x >= 0, and 1 / x for x from 1 on, where it is FINE to infinity; the quick ones are 2 units in the last place off, of which 16
// bits show nothing, and where the result is denormal they say zero. (`__frcp_rn` has a branch for rare numbers.)
template <bool FINE>
__device__ __forceinline__ float decay(float x) {
    return FINE ? expf(-x) : quick_exp2(x * -1.44269504088896341f);
}
template <bool FINE>
__device__ __forceinline__ float inverse(float x) {
    const float about = quick_inverse(x);
    return FINE ? fmaf(about, fmaf(-x, about, 1.0f), about) : about;
}
__device__ __forceinline__ float halving(float x) { return quick_exp2(x); }  // 2^x for x <= 0

}  // namespace

#include "activation.h"

namespace {

constexpr int THREADS = 128;
template <class T>
constexpr int TILE = THREADS * SPAN<T>;  // elements that a block reads at a time

template <class T>
constexpr bool fine = sizeof(T) == 4;

template <class T>
__device__ __forceinline__ int64_t place(int64_t tile) {  // of a thread's pack
    return tile + static_cast<int>(threadIdx.x) * SPAN<T>;
}

struct Bias {
    const void* at;  // of x's dtype or, `wide`, of fp32; null: none
    bool wide, even;  // even: the columns of a pack are in one row, and aligned
    template <class T>
    __device__ __forceinline__ float one(int64_t column) const {
        return wide ? static_cast<const float*>(at)[column] : to_float(static_cast<const T*>(at)[column]);
    }
    template <int N, class B>
    __device__ __forceinline__ void neighbours(float (&to)[N], int64_t column) const {
        const B* from = static_cast<const B*>(at) + column;
#pragma unroll
        for (int j = 0; j < N; j++) to[j] = to_float(from[j]);
    }
    template <int N, class B>
    __device__ __forceinline__ void pack(float (&to)[N], int64_t column) const {
        spread(load<true, N>(static_cast<const B*>(at) + column), to);
    }
    // for a thread's pack, whose columns follow each other around the end of a row
    template <class T, int N>
    __device__ __forceinline__ void read(float (&to)[N], int64_t tile, int64_t dim) const {
        int64_t column = remainder(place<T>(tile), dim);
        if (even) return wide ? pack<N, float>(to, column) : pack<N, T>(to, column);
        if (column + N <= dim) return wide ? neighbours<N, float>(to, column) : neighbours<N, T>(to, column);
#pragma unroll
        for (int j = 0; j < N; j++) {
            to[j] = one<T>(column);
            if (++column == dim) column = 0;
        }
    }
};

// ---- over all elements, in a row as they lie

template <class T>
constexpr int PARTS = 8 / SPAN<T>;  // packs of a thread: eight elements

// 16 bytes of an aligned array. PASSING: they stay in the second cache (ptx.h), by which on an H200 won 1 to 1.5 % the gated kernels but
// for the forward in fp32, whose misaligned rows lost as much, and in fp32 the others.
template <bool PASSING>
__device__ __forceinline__ uint4 bring(const void* p) {
    return PASSING ? read_passing<false, true>(static_cast<const uint4*>(p)) : *static_cast<const uint4*>(p);
}
template <bool PASSING, class T>
__device__ __forceinline__ Pack<T, SPAN<T>> load_aligned(const T* p) {
    const uint4 words = bring<PASSING>(p);
    return *reinterpret_cast<const Pack<T, SPAN<T>>*>(&words);
}
// A pack from wherever, out of the aligned ones that it lies in, one or two.
template <bool PASSING, class T>
__device__ __forceinline__ Pack<T, SPAN<T>> load_across(const T* p) {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(p) / sizeof(T) % SPAN<T>);
    const auto* from = reinterpret_cast<const uint4*>(p - shift);
    const uint4 own = bring<PASSING>(from), next = bring<PASSING>(from + (shift ? 1 : 0));
    uint32_t words[8] = {own.x, own.y, own.z, own.w, next.x, next.y, next.z, next.w};
    behind<sizeof(T)>(words, shift);
    Pack<T, SPAN<T>> pack;
    *reinterpret_cast<uint4*>(&pack) = make_uint4(words[0], words[1], words[2], words[3]);
    return pack;
}

// The same; in fp32 one by one, which take 5 % less time than out of two packs.
template <class T>
__device__ __forceinline__ Pack<T, SPAN<T>> load_apart(const T* p) {
    if constexpr (fine<T>) {
        Pack<T, SPAN<T>> pack;
#pragma unroll
        for (int j = 0; j < SPAN<T>; j++) pack.at[j] = read_passing(p + j);
        return pack;
    } else {
        return load_across<true>(p);
    }
}

template <int KIND, class T>
__global__ __launch_bounds__(THREADS) void forward(const T* __restrict__ x, const Bias bias, T* __restrict__ y, int64_t count,
                                                   int64_t dim) {
    if (!present<T>) return;
    constexpr int AHEAD = 2, N = SPAN<T>;  // packs read before the first is used
    const int64_t first = int64_t{blockIdx.x} * (TILE<T> * AHEAD), end = first + TILE<T> * AHEAD;
    const auto run = [&](auto load, auto whole) {
        Pack<T, N> in[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) in[u] = load(place<T>(first + u * TILE<T>));
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            float added[N] = {}, v[N];
            if (bias.at) bias.read<T>(added, first + u * TILE<T>, dim);
            spread(in[u], v);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] = activate<KIND, fine<T>>(v[j] + added[j]);
            put<whole.value>(y, rounded<T>(v), place<T>(first + u * TILE<T>), count);
        }
    };
    const auto misaligned = [](const T* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; };
    const bool across = misaligned(x);
    if (end > count || misaligned(y) || (across && (!first || end + N > count)))
        run([&](int64_t at) { return take<false, N>(x, at, count); }, std::false_type{});
    else if (across) run([&](int64_t at) { return load_apart(x + at); }, std::true_type{});
    else run([&](int64_t at) { return load_aligned<fine<T>>(x + at); }, std::true_type{});
}

template <int KIND, class T>
__global__ __launch_bounds__(THREADS) void backward(const T* __restrict__ grad, const T* __restrict__ x, const Bias bias,
                                                    T* __restrict__ dx, int64_t count, int64_t dim) {
    if (!present<T>) return;
    const int64_t first = int64_t{blockIdx.x} * (TILE<T> * PARTS<T>);
    whole_or_not(first + TILE<T> * PARTS<T>, count, [&](auto whole) {
        Pack<T, SPAN<T>> given[PARTS<T>], in[PARTS<T>];
#pragma unroll
        for (int u = 0; u < PARTS<T>; u++) {
            given[u] = take<whole.value, SPAN<T>>(grad, place<T>(first + u * TILE<T>), count);
            in[u] = take<whole.value, SPAN<T>>(x, place<T>(first + u * TILE<T>), count);
        }
#pragma unroll
        for (int u = 0; u < PARTS<T>; u++) {
            float added[SPAN<T>] = {}, v[SPAN<T>], g[SPAN<T>];
            if (bias.at) bias.read<T>(added, first + u * TILE<T>, dim);
            spread(in[u], v), spread(given[u], g);
#pragma unroll
            for (int j = 0; j < SPAN<T>; j++) {
                float slope;
                activate<KIND, fine<T>, true>(v[j] + added[j], slope);
                g[j] *= slope;
            }
            put<whole.value>(dx, rounded<T>(g), place<T>(first + u * TILE<T>), count);
        }
    }, grad, x, dx);
}

// Calls f with a way to read a thread's pack from `at` on of all these arrays of `count`: in aligned packs even where the arrays are
// not (PASSING: as above), of which the second is the next thread's first and comes from the first cache; one by one at the ends alone.
template <bool PASSING, class F, class T, class... Ts>
__device__ __forceinline__ void read(int64_t at, int64_t count, F f, const T* array, const Ts*... arrays) {
    constexpr int N = SPAN<T>;
    if (at + N <= count && reinterpret_cast<uintptr_t>(array) % 16 == 0 && ((reinterpret_cast<uintptr_t>(arrays) % 16 == 0) && ...)) {
        f([=](const auto* p) { return load_aligned<PASSING>(p + at); });
    } else if (at >= N && at + 2 * N <= count) {
        f([=](const auto* p) { return load_across<PASSING>(p + at); });
    } else {
        f([=](const auto* p) { return load<false, N>(p + at, some<N>(at, count)); });
    }
}

// What dropout makes of an array, if it does (DROPS): numbers of a thread's pack from element `at` on.
template <bool DROPS>
struct Drop {
    const int64_t* seed;
    Rate rate;
    template <int N>
    __device__ __forceinline__ void operator()(float (&v)[N], int64_t at) const {
        if (!DROPS) return;
        const Words words = philox(static_cast<uint64_t>(at) / 8, static_cast<uint64_t>(*seed));
#pragma unroll
        for (int j = 0; j < N; j++) {
            const bool keep = N == 8 || at % 8 == 0 ? kept(words, j, rate.threshold) : kept(words, j + 4, rate.threshold);
            v[j] = keep ? v[j] * rate.scale : 0.0f;
        }
    }
};

template <int KIND, class T, bool DROPS>
__global__ __launch_bounds__(THREADS) void gated_forward(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ y,
                                                         int64_t count, const Drop<DROPS> drop) {
    if (!present<T>) return;
    const int64_t first = int64_t{blockIdx.x} * (TILE<T> * PARTS<T>);
    Pack<T, SPAN<T>> a[PARTS<T>], b[PARTS<T>];
#pragma unroll
    for (int u = 0; u < PARTS<T>; u++)
        read<!fine<T>>(place<T>(first + u * TILE<T>), count, [&](auto way) { a[u] = way(gate), b[u] = way(up); }, gate, up);
#pragma unroll
    for (int u = 0; u < PARTS<T>; u++) {
        float v[SPAN<T>], w[SPAN<T>];
        spread(a[u], v), spread(b[u], w);
#pragma unroll
        for (int j = 0; j < SPAN<T>; j++) v[j] = activate<KIND, fine<T>>(v[j]) * w[j];
        drop(v, place<T>(first + u * TILE<T>));
        put<false>(y, rounded<T>(v), place<T>(first + u * TILE<T>), count);
    }
}

// dgate, dup and y may lie where gate, up and grad do: of those nothing but a thread's own is read then. y: act(gate) * up, or null.
template <int KIND, class T, bool DROPS>
__global__ __launch_bounds__(THREADS) void gated_backward(const T* grad, const T* gate, const T* up, T* dgate, T* dup, T* y,
                                                          int64_t count, const Drop<DROPS> drop) {
    if (!present<T>) return;
    const int64_t first = int64_t{blockIdx.x} * (TILE<T> * PARTS<T>);
    Pack<T, SPAN<T>> g[PARTS<T>], a[PARTS<T>], b[PARTS<T>];
#pragma unroll
    for (int u = 0; u < PARTS<T>; u++)
        read<true>(place<T>(first + u * TILE<T>), count, [&](auto way) { g[u] = way(grad), a[u] = way(gate), b[u] = way(up); }, grad, gate, up);
#pragma unroll
    for (int u = 0; u < PARTS<T>; u++) {
        float given[SPAN<T>], v[SPAN<T>], w[SPAN<T>];
        spread(g[u], given), spread(a[u], v), spread(b[u], w);
        drop(given, place<T>(first + u * TILE<T>));
#pragma unroll
        for (int j = 0; j < SPAN<T>; j++) {
            float slope, below;
            const float x = v[j], value = activate<KIND, fine<T>, true>(x, slope, below), both = given[j] * w[j], product = value * w[j];
            const float once = fmaf(-both, below, both);  // both * slope for x >= 0, which is so rounded twice and not three times
            v[j] = fine<T> && KIND != RELU && x >= 0.0f && once - once == 0.0f ? once : given[j] * slope * w[j];
            w[j] = given[j] * value;
            given[j] = product;
        }
        if (y) drop(given, place<T>(first + u * TILE<T>));
        put<false>(dgate, rounded<T>(v), place<T>(first + u * TILE<T>), count);
        put<false>(dup, rounded<T>(w), place<T>(first + u * TILE<T>), count);
        if (y) put<false>(y, rounded<T>(given), place<T>(first + u * TILE<T>), count);
    }
}

// ---- with the gradient of a bias: a thread keeps eight columns and walks down the rows of its part

constexpr int ACROSS = 64, DOWN = 8, STRIP = ACROSS * 8;  // threads across and down; columns of a block

// Blocks on a multiprocessor, at least: two have 64 registers a thread, which are too few for the others.
template <class T, bool VECTOR>
constexpr int PAIR = std::is_same_v<T, bf16> || (std::is_same_v<T, fp16> && VECTOR) ? 2 : 1;

template <int KIND, class T, bool VECTOR>
__global__ __launch_bounds__(ACROSS * DOWN, PAIR<T, VECTOR>) void backward_sums(
    const T* __restrict__ grad, const T* __restrict__ x, const Bias bias, T* __restrict__ dx, float* __restrict__ partial, int64_t rows, int64_t dim, int64_t height, unsigned strips) {
    if (!present<T>) return;
    constexpr int AHEAD = 2;  // rows read before the first is used
    const int64_t strip = int64_t{blockIdx.x % strips} * STRIP, part = blockIdx.x / strips;
    const int64_t last = part * height + height < rows ? part * height + height : rows;
    // of a strip, a thread has eight neighbours, or where they are not aligned every 64th column: neighbours for a warp
    const auto column = [](int j) { return static_cast<int>(VECTOR ? threadIdx.x * 8 + j : threadIdx.x + j * ACROSS); };
    float added[8], sums[8] = {};
    bool mine[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        mine[j] = strip + column(j) < dim;
        added[j] = bias.at && mine[j] ? bias.one<T>(strip + column(j)) : 0.0f;
    }
    const auto read = [&](const T* row) {
        if constexpr (VECTOR) {
            return load8<true>(row + column(0));
        } else {
            Pack<T> pack;
#pragma unroll
            for (int j = 0; j < 8; j++) pack.at[j] = mine[j] ? row[column(j)] : from_float<T>(0.0f);
            return pack;
        }
    };
    if (mine[0])
        for (int64_t row = part * height + threadIdx.y; row < last; row += DOWN * AHEAD) {
            const int64_t at = row * dim + strip;
            Pack<T> in[AHEAD], given[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; u++)
                if (row + u * DOWN < last) in[u] = read(x + at + u * DOWN * dim), given[u] = read(grad + at + u * DOWN * dim);
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                if (row + u * DOWN >= last) break;
                float v[8], d[8];
                spread(in[u], v), spread(given[u], d);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    float slope;
                    activate<KIND, fine<T>, true>(v[j] + added[j], slope);
                    d[j] *= slope;
                    sums[j] += d[j];
                }
                T* to = dx + at + u * DOWN * dim;
                if (VECTOR) store8<true>(to + column(0), rounded<T>(d));
                else
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        if (mine[j]) to[column(j)] = from_float<T>(d[j]);
            }
        }
    __shared__ float shared[DOWN][STRIP];
#pragma unroll
    for (int j = 0; j < 8; j++) shared[threadIdx.y][column(j)] = sums[j];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < STRIP / (ACROSS * DOWN); k++) {
        const int c = (k * DOWN + static_cast<int>(threadIdx.y)) * ACROSS + static_cast<int>(threadIdx.x);
        if (strip + c >= dim) return;
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < DOWN; i++) total += shared[i][c];
        partial[part * dim + strip + c] = total;
    }
}

template <class B>
__global__ __launch_bounds__(256) void add_parts(const float* __restrict__ partial, B* __restrict__ out, int64_t parts, int64_t dim) {
    __shared__ float sums[8][33], rests[8][33];
    const int64_t column = int64_t{blockIdx.x} * 32 + threadIdx.x;
    Total total;
    if (column < dim)
        for (int64_t part = threadIdx.y; part < parts; part += 8) total.add(partial[part * dim + column]);
    sums[threadIdx.y][threadIdx.x] = total.sum, rests[threadIdx.y][threadIdx.x] = total.rest;
    __syncthreads();
    if (threadIdx.y || column >= dim) return;
    for (int i = 1; i < 8; i++) total.add(sums[i][threadIdx.x], rests[i][threadIdx.x]);
    out[column] = from_float<B>(total.whole());
}

unsigned blocks_for(int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

Bias bias_of(const Array& bias, int64_t dim) { return {bias.data, bias && bias.dtype == F32, dim % 8 == 0 && bias.aligned()}; }

void check(Call& call, const Array& x, const Array& bias) {
    if (bias && bias.dtype != x.dtype && bias.dtype != F32) call.refuse("bias: another dtype than x, and not float32");
    call.ready();
    check_present(call, x.dtype);
}

}  // namespace

MC_KERNEL(activation) {
    const Forward a(call);
    check(call, a.x, a.bias);
    const int64_t count = a.x.shape.count();
    if (!count) return;
    const auto stream = static_cast<cudaStream_t>(call.stream);
    const unsigned blocks = blocks_for(count, THREADS * (a.x.dtype == F32 ? 8 : 16));
    MC_FOR_FLOAT(a.x.dtype, T, MC_FOR_KIND(a.kind, KIND,
        forward<KIND, T><<<blocks, THREADS, 0, stream>>>(a.x.as<T>(), bias_of(a.bias, a.dim), a.y.as<T>(), count, a.dim)))
}

MC_KERNEL(activation_backward) {
    const Backward a(call, 1 << 16);
    check(call, a.x, a.bias);
    const int64_t count = a.x.shape.count(), dim = a.dim;
    const auto stream = static_cast<cudaStream_t>(call.stream);
    if (!a.partial) {
        if (!count) return;
        const unsigned blocks = blocks_for(count, THREADS * 8);
        MC_FOR_FLOAT(a.x.dtype, T, MC_FOR_KIND(a.kind, KIND,
            backward<KIND, T><<<blocks, THREADS, 0, stream>>>(
                a.grad.as<T>(), a.x.as<T>(), bias_of(a.bias, dim), a.dx.as<T>(), count, dim)))
        return;
    }
    if (!dim) return;
    const int64_t rows = count / dim, height = rows ? (rows + a.parts - 1) / a.parts : 1;
    const int64_t used = rows ? (rows + height - 1) / height : 0;  // parts that have rows
    const bool vector = a.grad.aligned() && a.x.aligned() && a.dx.aligned() && dim % 8 == 0;
    if (used) {
        const unsigned strips = blocks_for(dim, STRIP);
        const auto blocks = static_cast<unsigned>(used * strips);
        MC_FOR_FLOAT(a.x.dtype, T, MC_FOR_KIND(a.kind, KIND, MC_FOR_BOOL(vector, VECTOR,
            backward_sums<KIND, T, VECTOR><<<blocks, dim3(ACROSS, DOWN), 0, stream>>>(
                a.grad.as<T>(), a.x.as<T>(), bias_of(a.bias, dim), a.dx.as<T>(), a.partial.as<float>(), rows, dim, height, strips))))
    }
    MC_FOR_FLOAT(a.dbias.dtype, B, add_parts<B><<<blocks_for(dim, 32), dim3(32, 8), 0, stream>>>(
        a.partial.as<float>(), a.dbias.as<B>(), used, dim))
}

MC_KERNEL(gated) {
    const Gated z(call);
    check_present(call, z.gate.dtype);
    const int64_t count = z.gate.shape.count();
    if (!count) return;
    const unsigned blocks = blocks_for(count, THREADS * 8);
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(z.gate.dtype, T, MC_FOR_KIND(z.kind, KIND, MC_FOR_BOOL(static_cast<bool>(z.seed), DROPS,
        gated_forward<KIND, T, DROPS><<<blocks, THREADS, 0, stream>>>(
            z.gate.as<T>(), z.up.as<T>(), z.y.as<T>(), count, Drop<DROPS>{z.seed.as<int64_t>(), z.rate}))))
}

MC_KERNEL(gated_backward) {
    const GatedBackward z(call);
    if (z.in_place && !(z.grad.aligned() && z.gate.aligned() && z.up.aligned()))
        call.refuse("dgate: not aligned, and read where it is written");
    check_present(call, z.dgate.dtype);
    const int64_t count = z.dgate.shape.count();
    if (!count) return;
    const unsigned blocks = blocks_for(count, THREADS * 8);
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(z.dgate.dtype, T, MC_FOR_KIND(z.kind, KIND, MC_FOR_BOOL(static_cast<bool>(z.seed), DROPS,
        gated_backward<KIND, T, DROPS><<<blocks, THREADS, 0, stream>>>(
            z.grad.as<T>(), z.gate.as<T>(), z.up.as<T>(), z.dgate.as<T>(), z.dup.as<T>(), z.y ? z.y.as<T>() : nullptr, count,
            Drop<DROPS>{z.seed.as<int64_t>(), z.rate}))))
}
