// Dropout (dropout.h). A thread takes 8 elements: one counter.
#include "cuda.h"
#include "dropout.h"

namespace {

constexpr int THREADS = 256;

template <class T, class R>
__global__ __launch_bounds__(THREADS) void drop(const T* __restrict__ x, const R* __restrict__ residual, R* __restrict__ y, int64_t n,
                                                const int64_t* __restrict__ seed, uint32_t threshold, float scale) {
    if (!present<T> || !present<R>) return;
    const uint64_t key = static_cast<uint64_t>(*seed);
    const int64_t first = int64_t{blockIdx.x} * THREADS, group = first + threadIdx.x, at = group * 8;
    whole_or_not((first + THREADS) * 8, n, [&](auto whole) {
        float v[8], w[8];
        spread(take<whole.value>(x, at, n), v);
        if (residual) spread(take<whole.value>(residual, at, n), w);
        const Words words = philox(group, key);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float value = kept(words, i, threshold) ? v[i] * scale : 0.0f;
            w[i] = residual ? value + w[i] : value;
        }
        put<whole.value>(y, rounded<R>(w), at, n);
    }, x, residual, y);
}

}  // namespace

MC_KERNEL(dropout) {
    const Dropout a(call);
    check_present(call, a.x.dtype);
    check_present(call, a.y.dtype);
    const int64_t n = a.x.shape.count();
    if (!n) return;
    const auto blocks = static_cast<unsigned>((n + THREADS * 8 - 1) / (THREADS * 8));
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(a.x.dtype, T, MC_FOR_FLOAT(a.y.dtype, R, drop<T, R><<<blocks, THREADS, 0, stream>>>(
        a.x.as<T>(), a.residual.as<R>(), a.y.as<R>(), n, a.seed.as<int64_t>(), a.rate.threshold, a.rate.scale)))
}
