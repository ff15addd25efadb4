// Dropout with an optional residual: out = residual + x * mask / (1 - p). The mask is counter-based (philox.h) and never stored;
// the gradient of x is the same kernel on the gradient, without a residual. A thread takes 8 elements: one counter.
#include "cuda.h"
#include "philox.h"

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
    const Array x = call.in("x", FLOATS);
    const Array residual = call.maybe("residual", FLOATS, x.shape);
    const Array seed = call.in("seed", I64, Shape{1});
    const double p = call.real("p");
    const Array y = call.out("y", residual ? residual.dtype : x.dtype, x.shape);
    call.ready();
    check_present(call, x.dtype);
    check_present(call, y.dtype);
    const int64_t n = x.shape.count();
    if (!n) return;
    const uint32_t threshold = static_cast<uint32_t>(p * 65536 + 0.5);
    const float scale = threshold >= 65536 ? 0.0f : 65536.0f / (65536 - threshold);
    const auto blocks = static_cast<unsigned>((n + THREADS * 8 - 1) / (THREADS * 8));
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(x.dtype, T, MC_FOR_FLOAT(y.dtype, R,
        drop<T, R><<<blocks, THREADS, 0, stream>>>(x.as<T>(), residual.as<R>(), y.as<R>(), n, seed.as<int64_t>(), threshold, scale)))
}
