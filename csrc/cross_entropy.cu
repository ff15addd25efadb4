// Cross entropy of rows of logits (n, stride), of which the first `vocab` columns count: forward, backward, and both in one go with
// the gradient over the logits. One block a row: it is read once with a running maximum, and where the gradient is wanted read again
// from its end (what was read last is still in the second-level cache) and written: 4 bytes an element of bf16 in all.
// A label outside of the vocabulary is never read at: it gives a loss that is NaN.
#include "cuda.h"

#include "cross_entropy.h"

namespace {

constexpr int UNROLL = 4;  // packs of a thread in flight: 64 bytes, and no register too many for 1024 threads of a multiprocessor

// fp32 is held to fp32's error; below it the fast exponential is exact enough
template <class T>
__device__ __forceinline__ float exponential(float x) {
    return sizeof(T) == 4 ? expf(x) : __expf(x);
}

struct Row {
    float most, exponentials, logits;  // the largest x, the sums of exp(x - most) and of x
};

template <class T>
__device__ __forceinline__ Row joined(const Row& a, const Row& b) {
    const float most = fmaxf(a.most, b.most);
    return {most, a.exponentials * expf(a.most - most) + b.exponentials * expf(b.most - most), a.logits + b.logits};
}

template <class T, int N>
__device__ __forceinline__ void add(Row& row, const float (&x)[N]) {
    float most = row.most;
#pragma unroll
    for (int i = 0; i < N; i++) most = fmaxf(most, x[i]);
    float total = row.exponentials * exponential<T>(row.most - most);
#pragma unroll
    for (int i = 0; i < N; i++) total += exponential<T>(x[i] - most), row.logits += x[i];
    row.most = most, row.exponentials = total;
}

// A row in whole aligned packs with fewer elements than one before and after: any row of any array is read at full width.
struct Cut {
    int64_t head, packs, tail;  // elements before, packs, where the elements after begin
    template <class T>
    __device__ Cut(const T* x, int64_t vocab) {
        const int64_t off = static_cast<int64_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
        head = off ? static_cast<int64_t>(16 / sizeof(T)) - off : 0;
        if (head > vocab) head = vocab;
        packs = (vocab - head) / SPAN<T>;
        tail = head + packs * SPAN<T>;
    }
};

// What every thread of the block knows of the row in the end; joined in one order.
template <class T>
__device__ Row read(const T* x, int64_t vocab) {
    const Cut cut(x, vocab);
    const int t = threadIdx.x;
    Row row{LOWEST, 0.0f, 0.0f};
    for (int64_t pack = t; pack < cut.packs; pack += int64_t{UNROLL} * blockDim.x) {
        Pack<T, SPAN<T>> in[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (pack + u * blockDim.x < cut.packs) in[u] = load<true, SPAN<T>>(x + cut.head + (pack + u * blockDim.x) * SPAN<T>);
        if (pack + (UNROLL - 1) * blockDim.x < cut.packs) {  // 16 at once, for which the sum is scaled anew once
#pragma unroll
            for (int u = 0; u < UNROLL; u += 16 / SPAN<T>) {
                float value[16];
#pragma unroll
                for (int i = 0; i < 16; i++) value[i] = to_float(in[u + i / SPAN<T>].at[i % SPAN<T>]);
                add<T>(row, value);
            }
            continue;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (pack + u * blockDim.x < cut.packs) {
                float value[SPAN<T>];
#pragma unroll
                for (int i = 0; i < SPAN<T>; i++) value[i] = to_float(in[u].at[i]);
                add<T>(row, value);
            }
    }
    if (t < cut.head) {
        const float value[1] = {to_float(x[t])};
        add<T>(row, value);
    }
    if (t < vocab - cut.tail) {
        const float value[1] = {to_float(x[cut.tail + t])};
        add<T>(row, value);
    }
    __shared__ Row parts[32];
    __syncthreads();  // the row before has been read out of `parts`
#pragma unroll
    for (int lane = 16; lane; lane /= 2)
        row = joined<T>(row, {__shfl_xor_sync(0xFFFFFFFFu, row.most, lane), __shfl_xor_sync(0xFFFFFFFFu, row.exponentials, lane),
                              __shfl_xor_sync(0xFFFFFFFFu, row.logits, lane)});
    if (t % 32 == 0) parts[t / 32] = row;
    __syncthreads();
    row = parts[0];
    for (int w = 1; w < static_cast<int>(blockDim.x / 32); w++) row = joined<T>(row, parts[w]);
    return row;
}

// y = exp(x - base) * factor - share for a row, from its end to its beginning; x and y may be the same. Without `factor` zeros.
template <class T, bool ZERO>
__device__ void write(const T* x, T* y, int64_t vocab, float base, float factor, float share) {
    const Cut cut(y, vocab);
    const bool same = reinterpret_cast<uintptr_t>(x) % 16 == reinterpret_cast<uintptr_t>(y) % 16;
    const int t = threadIdx.x;
    auto one = [&](int64_t i) { y[i] = from_float<T>(ZERO ? 0.0f : exponential<T>(to_float(x[i]) - base) * factor - share); };
    if (t < vocab - cut.tail) one(cut.tail + t);
    const int64_t step = int64_t{UNROLL} * blockDim.x, steps = (cut.packs + step - 1) / step;
    const auto each = [&](auto same) {  // asked before each pack it would have one wait for the next
        for (int64_t s = steps - 1; s >= 0; s--) {
            const int64_t pack = s * step + t;
            Pack<T, SPAN<T>> in[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (!ZERO && pack + u * blockDim.x < cut.packs) {
                    const T* from = x + cut.head + (pack + u * blockDim.x) * SPAN<T>;
                    in[u] = load<same.value, SPAN<T>>(from);
                }
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (pack + u * blockDim.x < cut.packs) {
#pragma unroll
                    for (int i = 0; i < SPAN<T>; i++)
                        in[u].at[i] = from_float<T>(ZERO ? 0.0f : exponential<T>(to_float(in[u].at[i]) - base) * factor - share);
                    store<true>(y + cut.head + (pack + u * blockDim.x) * SPAN<T>, in[u]);
                }
        }
    };
    if (same) each(std::true_type{});
    else each(std::false_type{});
    if (t < cut.head) one(t);
}

__device__ __forceinline__ float loss_of(const Row& row, float lse, float label, int64_t vocab, Loss<float> loss) {
    const float smooth = loss.smoothing != 0.0f ? loss.smoothing * (row.logits / vocab) : 0.0f;
    return (lse - label) + (loss.smoothing != 0.0f ? loss.smoothing * label : 0.0f) - smooth + loss.z * lse * lse;
}

// BOTH: the gradient goes over the logits.
template <class T, bool BOTH>
__global__ void __launch_bounds__(512, 2) forward(T* logits, const int64_t* labels, int64_t n, int64_t stride, int64_t vocab,
                                                  Loss<float> loss, float scale, float* losses, float* lses) {
    if (!present<T>) return;
    for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
        T* x = logits + i * stride;
        const int64_t label = labels[i];
        if (label == IGNORE) {
            if (BOTH) write<T, true>(x, x, vocab, 0.0f, 0.0f, 0.0f);
            if (threadIdx.x == 0) {
                losses[i] = 0.0f;
                if (lses) lses[i] = 0.0f;
            }
            continue;
        }
        const bool known = label >= 0 && label < vocab;
        const float at = known ? to_float(x[label]) : __int_as_float(0x7FC00000);  // NaN
        const Row row = read(x, vocab);
        const float lse = row.most + logf(row.exponentials);
        if (threadIdx.x == 0) {
            losses[i] = loss_of(row, lse, at, vocab, loss);
            if (lses) lses[i] = lse;
        }
        if (BOTH) {
            const float factor = scale * (1.0f + 2.0f * loss.z * lse) / row.exponentials, share = scale * loss.smoothing / vocab;
            write<T, false>(x, x, vocab, row.most, factor, share);
            __syncthreads();
            if (known && threadIdx.x == 0)
                x[label] = from_float<T>(exponential<T>(at - row.most) * factor - share - scale * (1.0f - loss.smoothing));
        }
    }
}

template <class T>
__global__ void __launch_bounds__(512, 2) backward(const T* logits, const int64_t* labels, const float* lses, const float* grad,
                                                   T* out, int64_t n, int64_t vocab, Loss<float> loss) {
    if (!present<T>) return;
    for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
        const T* x = logits + i * vocab;
        T* y = out + i * vocab;
        const int64_t label = labels[i];
        if (label == IGNORE) {
            write<T, true>(x, y, vocab, 0.0f, 0.0f, 0.0f);
            continue;
        }
        const float lse = lses[i], factor = *grad * (1.0f + 2.0f * loss.z * lse), share = *grad * loss.smoothing / vocab;
        write<T, false>(x, y, vocab, lse, factor, share);
        __syncthreads();
        if (label >= 0 && label < vocab && threadIdx.x == 0)
            y[label] = from_float<T>(exponential<T>(to_float(x[label]) - lse) * factor - share - *grad * (1.0f - loss.smoothing));
    }
}

__global__ void __launch_bounds__(1024) sum(const float* x, int64_t n, float* y) {
    __shared__ double parts[32];
    double total = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) total += x[i];
    for (int lane = 16; lane; lane /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, lane);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = total;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < static_cast<int>(blockDim.x / 32); w++) total += parts[w];
        *y = static_cast<float>(total);
    }
}

template <class T, bool VECTOR>
__global__ void multiply(T* x, int64_t n, const float* factor) {
    const float f = *factor;
    if (f == 1.0f) return;
    for (int64_t at = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * 8; at < n; at += int64_t{gridDim.x} * blockDim.x * 8) {
        const int count = n - at < 8 ? static_cast<int>(n - at) : 8;
        Pack<T> pack = load8<VECTOR>(x + at, count);
#pragma unroll
        for (int i = 0; i < 8; i++) pack.at[i] = from_float<T>(to_float(pack.at[i]) * f);
        store8<VECTOR>(x + at, pack, count);
    }
}

// Threads for a row: one for each `packs` of its packs, and `most` at the most. Where each has little to do, threads wait
// longer for one another than for memory: a thousand of them take up to 2.6 times as long forward.
template <class T>
int threads_for(int64_t vocab, int64_t packs, int64_t most) {
    const int64_t wanted = (vocab / SPAN<T> / packs + 31) / 32 * 32;
    return static_cast<int>(wanted < 32 ? 32 : wanted > most ? most : wanted);
}

// Where a row is read twice, as many rows are at work at once as the second-level cache holds: of 50 MB on an H200.
template <class T>
int threads_for_both(int64_t vocab) { return threads_for<T>(vocab, 16, vocab * sizeof(T) > (100 << 10) ? 512 : 256); }

unsigned blocks_for(int64_t n) { return static_cast<unsigned>(n < (1 << 30) ? n : (1 << 30)); }

}  // namespace

MC_KERNEL(cross_entropy) {
    const Arguments<FORWARD, float> a(call);
    check_present(call, a.logits.dtype);
    if (!a.n) return;
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(a.logits.dtype, T, forward<T, false><<<blocks_for(a.n), threads_for<T>(a.vocab, 32, 128), 0, stream>>>(
        a.logits.as<T>(), a.labels.as<int64_t>(), a.n, a.stride, a.vocab, a.loss, 1.0f, a.losses.as<float>(), a.lse.as<float>()))
}

MC_KERNEL(cross_entropy_both) {
    const Arguments<BOTH, float> a(call);
    check_present(call, a.logits.dtype);
    if (!a.n) return;
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(a.logits.dtype, T, forward<T, true><<<blocks_for(a.n), threads_for_both<T>(a.vocab), 0, stream>>>(
        a.logits.as<T>(), a.labels.as<int64_t>(), a.n, a.stride, a.vocab, a.loss, a.scale, a.losses.as<float>(), nullptr))
}

MC_KERNEL(cross_entropy_backward) {
    const Arguments<BACKWARD, float> a(call);
    check_present(call, a.logits.dtype);
    if (!a.n) return;
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(a.logits.dtype, T, backward<T><<<blocks_for(a.n), threads_for<T>(a.vocab, 8, 512), 0, stream>>>(
        a.logits.as<T>(), a.labels.as<int64_t>(), a.lse.as<float>(), a.grad.as<float>(), a.out.as<T>(), a.n, a.vocab, a.loss))
}

// The sum of the rows' losses, in one order.
MC_KERNEL(total) {
    const Array x = call.in("x", F32);
    const Array y = call.out("y", F32, Shape{});
    call.ready();
    sum<<<1, 1024, 0, static_cast<cudaStream_t>(call.stream)>>>(x.as<float>(), x.shape.count(), y.as<float>());
}

// x *= factor in fp32; nothing is touched where the factor is 1, which nobody waits to know.
MC_KERNEL(scale) {
    const Array x = call.inout("x", FLOATS);
    const Array factor = call.in("factor", F32, Shape{});
    call.ready();
    const int64_t n = x.shape.count();
    if (!n) return;
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(x.dtype, T, MC_FOR_BOOL(x.aligned(), VECTOR, multiply<T, VECTOR>
        <<<grid((n + 7) / 8, 256), 256, 0, stream>>>(x.as<T>(), n, factor.as<float>())))
}
