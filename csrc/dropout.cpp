// Dropout (dropout.h).
#include "dropout.h"
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
    const Dropout a(call);
    MC_FOR_FLOAT(a.x.dtype, T, MC_FOR_FLOAT(a.y.dtype, R,
        drop(a.x.as<T>(), a.residual.as<R>(), a.y.as<R>(), a.x.shape.count(), *a.seed.as<uint64_t>(), a.rate.threshold, a.rate.scale)))
}
