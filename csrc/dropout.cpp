// Dropout with an optional residual: out = residual + x * mask / (1 - p). The mask is counter-based (philox.h) and never stored;
// the gradient of x is the same kernel on the gradient, without a residual.
#include "random.h"

namespace {

template <class T, class R>
void drop(const T* x, const R* residual, R* y, int64_t n, uint64_t seed, uint32_t threshold, float scale) {
    mc::parallel((n + BLOCK - 1) / BLOCK, 64, [=](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; block++) {
            uint16_t random[BLOCK];
            draw(random, block, seed);
            const int64_t at = block * BLOCK, left = n - at < BLOCK ? n - at : BLOCK;
            each(left, [&](int64_t i, int lanes) {
                const vf value = masked(load_n(x + at + i, lanes) * scale, random + i, threshold);
                store_n(y + at + i, residual ? value + load_n(residual + at + i, lanes) : value, lanes);
            });
        }
    });
}

}  // namespace

MC_KERNEL(dropout) {
    const Array x = call.in("x", FLOATS);
    const Array residual = call.maybe("residual", FLOATS, x.shape);
    const Array seed = call.in("seed", I64, Shape{1});
    const double p = call.real("p");
    const Array y = call.out("y", residual ? residual.dtype : x.dtype, x.shape);
    call.ready();
    const Rate rate(p);
    MC_FOR_FLOAT(x.dtype, T, MC_FOR_FLOAT(y.dtype, R,
        drop(x.as<T>(), residual.as<R>(), y.as<R>(), x.shape.count(), *seed.as<uint64_t>(), rate.threshold, rate.scale)))
}
