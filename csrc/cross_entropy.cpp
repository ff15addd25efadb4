// Cross entropy (cross_entropy.h): row by row, forward, backward, and both in one go with the gradient over the logits. A row of GPT-2's
// vocabulary (200 KB) stays in the second-level cache between the passes. A label outside of the vocabulary is an exception before
// anything is written.
#include "simd.h"

#include "cross_entropy.h"

namespace {

struct Row {
    float most;
    double exponentials, logits;  // sums of exp(x - most) and of x
    double lse() const { return most + std::log(exponentials); }
};

// f(offset, lanes, which of four accumulators) over a row
template <class F>
MC_INLINE void each4(int64_t dim, F f) {
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES)
        for (int k = 0; k < 4; k++) f(i + k * LANES, LANES, k);
    each(dim - i, [&](int64_t j, int lanes) { f(i + j, lanes, 0); });
}

template <class T>
MC_INLINE vf load_filled(const T* p, int lanes) {
    return lanes == LANES ? load(p) : load_some(p, lanes, LOWEST);
}

template <bool KEEP, class T>  // KEEP: write the exponentials over a row of fp32
MC_INLINE Row read(T* x, int64_t vocab, bool smooth) {
    vf most[4] = {all(LOWEST), all(LOWEST), all(LOWEST), all(LOWEST)}, total[4] = {}, plain[4] = {};
    each4(vocab, [&](int64_t i, int lanes, int k) { most[k] = vmax(most[k], load_filled(x + i, lanes)); });
    Row row;
    row.most = largest(vmax(vmax(most[0], most[1]), vmax(most[2], most[3])));
    if (smooth) each4(vocab, [&](int64_t i, int lanes, int k) { plain[k] += load_n(x + i, lanes); });
    each4(vocab, [&](int64_t i, int lanes, int k) {
        vf e = vexp(load_filled(x + i, lanes) - row.most);
        if constexpr (KEEP) store_n(x + i, e, lanes);
        if (lanes < LANES) e = only(e, lanes, 0.0f);
        total[k] += e;
    });
    row.exponentials = row.logits = 0;
    for (int k = 0; k < 4; k++)
        for (int lane = 0; lane < LANES; lane++) row.exponentials += total[k][lane], row.logits += plain[k][lane];
    return row;
}

MC_INLINE double loss_of(const Row& row, double label, int64_t vocab, const Loss<double>& loss) {
    const double lse = row.lse(), smooth = loss.smoothing ? loss.smoothing * (row.logits / vocab) : 0.0;
    return lse - (1 - loss.smoothing) * label - smooth + loss.z * lse * lse;
}

MC_INLINE double number(float x) { return x; }
template <class T>
MC_INLINE double number(T x) {
    return load_some(&x, 1)[0];
}
template <class T>
MC_INLINE void put(T* p, double x) {
    store_some(p, all(static_cast<float>(x)), 1);
}

template <class T>
void forward(const T* logits, const int64_t* labels, int64_t n, int64_t stride, int64_t vocab, Loss<double> loss, float* losses, float* lse) {
    mc::parallel(n, 1 + 32768 / vocab, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            losses[i] = 0;
            if (lse) lse[i] = 0;
            if (labels[i] == IGNORE) continue;
            const T* x = logits + i * stride;
            const Row row = read<false>(x, vocab, loss.smoothing != 0);
            losses[i] = static_cast<float>(loss_of(row, number(x[labels[i]]), vocab, loss));
            if (lse) lse[i] = static_cast<float>(row.lse());
        }
    });
}

template <class T>
void both(T* logits, const int64_t* labels, int64_t n, int64_t stride, int64_t vocab, Loss<double> loss, double scale, float* losses) {
    mc::parallel(n, 1 + 32768 / vocab, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            T* x = logits + i * stride;
            losses[i] = 0;
            if (labels[i] == IGNORE) {
                memset(x, 0, vocab * sizeof(T));
                continue;
            }
            constexpr bool KEEP = sizeof(T) == 4;  // a second exponential costs less than rounding the first
            const double label = number(x[labels[i]]);
            const Row row = read<KEEP>(x, vocab, loss.smoothing != 0);
            losses[i] = static_cast<float>(loss_of(row, label, vocab, loss));
            const double factor = scale * (1 + 2 * loss.z * row.lse()) / row.exponentials, share = scale * loss.smoothing / vocab;
            const vf k = all(static_cast<float>(factor)), less = all(static_cast<float>(share));
            each(vocab, [&](int64_t j, int lanes) {
                const vf e = load_n(x + j, lanes);
                store_n(x + j, (KEEP ? e : vexp(e - row.most)) * k - less, lanes);
            });
            const vf e = vexp(all(static_cast<float>(label)) - row.most);
            put(x + labels[i], e[0] * factor - share - scale * (1 - loss.smoothing));
        }
    });
}

template <class T>
void backward(const T* logits, const int64_t* labels, const float* lse, double grad, T* out, int64_t n, int64_t vocab, Loss<double> loss) {
    mc::parallel(n, 1 + 32768 / vocab, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const T* x = logits + i * vocab;
            T* y = out + i * vocab;
            if (labels[i] == IGNORE) {
                memset(y, 0, vocab * sizeof(T));
                continue;
            }
            const double factor = grad * (1 + 2 * loss.z * lse[i]), share = grad * loss.smoothing / vocab;
            const vf k = all(static_cast<float>(factor)), less = all(static_cast<float>(share));
            each(vocab, [&](int64_t j, int lanes) { store_n(y + j, vexp(load_n(x + j, lanes) - lse[i]) * k - less, lanes); });
            const vf e = vexp(all(static_cast<float>(number(x[labels[i]]))) - lse[i]);
            put(y + labels[i], e[0] * factor - share - grad * (1 - loss.smoothing));
        }
    });
}

void check(Call& call, const int64_t* labels, int64_t n, int64_t vocab) {
    for (int64_t i = 0; i < n; i++)
        if (labels[i] != IGNORE && (labels[i] < 0 || labels[i] >= vocab))
            call.refuse("labels[%lld] is %lld; wanted 0 to %lld, or %lld to ignore it", static_cast<long long>(i),
                        static_cast<long long>(labels[i]), static_cast<long long>(vocab - 1), static_cast<long long>(IGNORE));
}

}  // namespace

MC_KERNEL(cross_entropy) {
    const Arguments<FORWARD, double> a(call);
    check(call, a.labels.as<int64_t>(), a.n, a.vocab);
    if (!a.n) return;
    MC_FOR_FLOAT(a.logits.dtype, T, forward(a.logits.as<const T>(), a.labels.as<int64_t>(), a.n, a.stride, a.vocab, a.loss,
                                            a.losses.as<float>(), a.lse.as<float>()))
}

MC_KERNEL(cross_entropy_both) {
    const Arguments<BOTH, double> a(call);
    check(call, a.labels.as<int64_t>(), a.n, a.vocab);
    if (!a.n) return;
    MC_FOR_FLOAT(a.logits.dtype, T, both(a.logits.as<T>(), a.labels.as<int64_t>(), a.n, a.stride, a.vocab, a.loss, a.scale,
                                         a.losses.as<float>()))
}

MC_KERNEL(cross_entropy_backward) {
    const Arguments<BACKWARD, double> a(call);
    check(call, a.labels.as<int64_t>(), a.n, a.vocab);
    if (!a.n) return;
    MC_FOR_FLOAT(a.logits.dtype, T, backward(a.logits.as<const T>(), a.labels.as<int64_t>(), a.lse.as<float>(), *a.grad.as<float>(),
                                             a.out.as<T>(), a.n, a.vocab, a.loss))
}

// The sum of the rows' losses, in one order whatever the threads.
MC_KERNEL(total) {
    const Array x = call.in("x", F32);
    const Array y = call.out("y", F32, Shape{});
    call.ready();
    double sum = 0;
    for (int64_t i = 0; i < x.shape.count(); i++) sum += x.as<float>()[i];
    *y.as<float>() = static_cast<float>(sum);
}

// x *= factor in fp32; nothing is touched where the factor is 1.
MC_KERNEL(scale) {
    const Array x = call.inout("x", FLOATS);
    const Array factor = call.in("factor", F32, Shape{});
    call.ready();
    const float f = *factor.as<float>();
    if (f == 1.0f) return;
    MC_FOR_FLOAT(x.dtype, T, mc::parallel(x.shape.count(), 32768, [data = x.as<T>(), f](int64_t begin, int64_t end) {
        T* part = data + begin;
        each(end - begin, [&](int64_t i, int lanes) { store_n(part + i, load_n(part + i, lanes) * f, lanes); });
    }))
}
