// Dropout with an optional residual: out = residual + x * mask / (1 - p). The mask is counter-based (philox.h) and never stored;
// the gradient of x is the same kernel on the gradient, without a residual. A thread takes 8 elements: one counter.
#include "cuda.h"
#include "philox.h"

namespace {

template <class T, class R, bool VECTOR>
__global__ void drop(const T* x, const R* residual, R* y, int64_t n, const int64_t* seed, uint32_t threshold, float scale) {
    const uint64_t key = static_cast<uint64_t>(*seed);
    for (int64_t group = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; group * 8 < n; group += int64_t{gridDim.x} * blockDim.x) {
        const int64_t at = group * 8;
        const int count = n - at < 8 ? static_cast<int>(n - at) : 8;
        const Words words = philox(group, key);
        Pack<T> in = load8<VECTOR>(x + at, count);
        Pack<R> out;
        if (residual) out = load8<VECTOR>(residual + at, count);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float value = kept(words, i, threshold) ? to_float(in.at[i]) * scale : 0.0f;
            out.at[i] = from_float<R>(residual ? value + to_float(out.at[i]) : value);
        }
        store8<VECTOR>(y + at, out, count);
    }
}

}  // namespace

MC_KERNEL(dropout) {
    const Array x = call.in("x", FLOATS);
    const Array residual = call.maybe("residual", FLOATS, x.shape);
    const Array seed = call.in("seed", I64, Shape{1});
    const double p = call.real("p");
    const Array y = call.out("y", residual ? residual.dtype : x.dtype, x.shape);
    call.ready();
    const int64_t n = x.shape.count();
    if (!n) return;
    const uint32_t threshold = static_cast<uint32_t>(p * 65536 + 0.5);
    const float scale = threshold >= 65536 ? 0.0f : 65536.0f / (65536 - threshold);
    const bool vector = x.aligned() && residual.aligned() && y.aligned();
    const int blocks = grid((n + 7) / 8, 256);
    const auto stream = static_cast<cudaStream_t>(call.stream);
    MC_FOR_FLOAT(x.dtype, T, MC_FOR_FLOAT(y.dtype, R, MC_FOR_BOOL(vector, VECTOR,
        drop<T, R, VECTOR><<<blocks, 256, 0, stream>>>(x.as<T>(), residual.as<R>(), y.as<R>(), n, seed.as<int64_t>(), threshold, scale))))
}
