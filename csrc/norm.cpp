// LayerNorm and RMSNorm (norm.h has the formulas). The row is in the first cache when it is read again.
//
// The backward cuts the rows into as many chunks as `partial` has, whatever the number of threads, and adds the chunks' sums for
// weight and bias in their order.
#include "norm.h"

#include <cstdlib>
#include <type_traits>

#include "random.h"

namespace {

struct Two {  // sums that are formed together
    vf first, second;
    MC_INLINE Two operator+(const Two& other) const { return {first + other.first, second + other.second}; }
    MC_INLINE void operator+=(const Two& other) { first += other.first, second += other.second; }
};

// f(offset, lanes), a vector or Two, summed over a row; f gives 0 in the lanes it has no element for. No addition waits for the one
// before it.
template <class F>
MC_INLINE auto summed(int64_t dim, F f) {
    decltype(f(0, LANES)) a{}, b{}, c{}, d{};
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) {
        a += f(i, LANES);
        b += f(i + LANES, LANES);
        c += f(i + 2 * LANES, LANES);
        d += f(i + 3 * LANES, LANES);
    }
    for (; i + LANES <= dim; i += LANES) a += f(i, LANES);
    if (i < dim) b += f(i, static_cast<int>(dim - i));
    return (a + b) + (c + d);
}

// Random bits in the order of the elements: a block of 128 is drawn once where neighbouring rows share it.
struct Drawn {
    const uint64_t seed;
    const Rate rate;
    int64_t block = -1;
    uint16_t random[BLOCK + LANES] = {};  // the rest of a row may be read 16 at a time

    // f(offset in the row, lanes, their bits) for the row that begins at element `at`
    template <class F>
    MC_INLINE void row(int64_t at, int64_t dim, F f) {
        for (int64_t i = 0; i < dim;) {
            const int64_t within = (at + i) % BLOCK, left = BLOCK - within < dim - i ? BLOCK - within : dim - i;
            if (block != (at + i) / BLOCK) draw(random, block = (at + i) / BLOCK, seed);
            each(left, [&](int64_t j, int lanes) { f(i + j, lanes, random + within + j); });
            i += left;
        }
    }
};

// total = residual + x * mask / (1 - p) for one row, and `whole`, unless it is null: the same before it is rounded; without a seed
// nothing is dropped
template <class T, class R>
void add(const T* x, const R* residual, R* total, float* whole, int64_t at, int64_t dim, Drawn* drawn) {
    const auto write = [=](int64_t i, int lanes, vf value) {
        const vf all = value + load_n(residual + i, lanes);
        store_n(total + i, all, lanes);
        if (whole) store_n(whole + i, all, lanes);
    };
    if (drawn)
        drawn->row(at, dim, [&](int64_t i, int lanes, const uint16_t* random) {
            write(i, lanes, masked(load_n(x + i, lanes) * drawn->rate.scale, random, drawn->rate.threshold));
        });
    else
        each(dim, [&](int64_t i, int lanes) { write(i, lanes, load_n(x + i, lanes)); });
}

struct Stats {
    float mean, rstd, shift;
    MC_INLINE vf normal(vf x) const { return (x - mean) * rstd + shift; }
    bool far() const { return mean * mean * rstd * rstd > 16; }  // of zero: it shows what a row is rounded by
};

template <class R, class O>
Stats norm_row(const R* x, const float* weight, const float* bias, O* out, int64_t dim, double eps, bool centred) {
    Stats s{};
    if (centred) s.mean = sum(summed(dim, [=](int64_t i, int lanes) { return load_n(x + i, lanes); })) / static_cast<float>(dim);
    const float mean = s.mean;
    const Two found = summed(dim, [=](int64_t i, int lanes) {
        const vf h = (lanes == LANES ? load(x + i) : load_some(x + i, lanes, mean)) - mean;
        return Two{h * h, h};
    });
    const double squares = sum(found.first), left = sum(found.second), n = static_cast<double>(dim);
    const double more = centred ? left / n : 0.0, rstd = 1 / std::sqrt(squares / n - more * more + eps);
    s.rstd = static_cast<float>(rstd), s.shift = static_cast<float>(-more * rstd);
    if (bias)
        each(dim, [=](int64_t i, int lanes) {
            store_n(out + i, s.normal(load_n(x + i, lanes)) * load_n(weight + i, lanes) + load_n(bias + i, lanes), lanes);
        });
    else
        each(dim, [=](int64_t i, int lanes) {
            store_n(out + i, load_n(x + i, lanes) * s.rstd * load_n(weight + i, lanes), lanes);
        });
    return s;
}

// With g = (grad + also) * weight and h the normalised row: stream = rstd * (g - mean(g) - h * mean(g * h)) + more; RMSNorm: no mean(g).
// branch = stream * mask / (1 - p), not of what was rounded to the stream's dtype.
template <class T, class R, class O>
void gradient_row(const O* grad, const O* also, const R* more, const R* x, const float* weight, R* stream, T* branch, float* dweight,
                  float* dbias, int64_t at, int64_t dim, Stats s, Drawn* drawn) {
    const float n = static_cast<float>(dim);
    const auto given = [=](int64_t i, int lanes) MC_INLINED {
        return also ? load_n(grad + i, lanes) + load_n(also + i, lanes) : load_n(grad + i, lanes);
    };
    const Two found = summed(dim, [=](int64_t i, int lanes) MC_INLINED {
        const vf d = given(i, lanes), g = d * load_n(weight + i, lanes), h = s.normal(load_n(x + i, lanes));
        store_n(dweight + i, load_n(dweight + i, lanes) + d * h, lanes);
        if (dbias) store_n(dbias + i, load_n(dbias + i, lanes) + d, lanes);
        return Two{g * h, g};
    });
    const float skewed = sum(found.first) / n, level = dbias ? sum(found.second) / n : 0.0f;
    const auto gradient = [&](int64_t i, int lanes) MC_INLINED {
        const vf g = given(i, lanes) * load_n(weight + i, lanes), h = s.normal(load_n(x + i, lanes));
        const vf beside = more ? load_n(more + i, lanes) : -vf{};  // -0 changes nothing, not even a zero; so the sum is rounded once
        const vf all = (g - level - h * skewed) * s.rstd + beside;
        store_n(stream + i, all, lanes);
        return all;
    };
    if (branch && drawn)
        drawn->row(at, dim, [&](int64_t i, int lanes, const uint16_t* random) MC_INLINED {
            store_n(branch + i, masked(gradient(i, lanes) * drawn->rate.scale, random, drawn->rate.threshold), lanes);
        });
    else if (branch)
        each(dim, [&](int64_t i, int lanes) MC_INLINED { store_n(branch + i, gradient(i, lanes), lanes); });
    else
        each(dim, [&](int64_t i, int lanes) MC_INLINED { gradient(i, lanes); });
}

constexpr int64_t GRAIN = 16384;  // elements that are worth a thread

int64_t grain(int64_t dim) { return dim < GRAIN ? GRAIN / dim : 1; }

template <class T>
constexpr Dtype dtype_of = std::is_same_v<T, float> ? F32 : std::is_same_v<T, bf16> ? BF16 : F16;

// Calls f with a value of the type of each: what is added, the total, what comes out.
template <class F>
void for_known(Dtype x, Dtype total, Dtype out, F f) {
    MC_FOR_FLOAT(total, R, MC_FOR_FLOAT(x, T, MC_FOR_FLOAT(out, O, {
        if constexpr (known(dtype_of<T>, dtype_of<R>, dtype_of<O>)) f(T{}, R{}, O{});
    })))
}

}  // namespace

MC_KERNEL(norm) {
    const Forward a(call, F32);
    const Array source = a.total ? a.total : a.x;
    if (!known(a.x.dtype, source.dtype, a.out.dtype)) call.refuse("no kernel for this mixture of dtypes");
    call.ready();
    const int64_t n = a.rows, dim = a.dim;
    if (!dim) return;
    const float *w = a.weight.as<float>(), *b = a.bias.as<float>();
    float* s = a.stats.as<float>();
    for_known(a.x.dtype, source.dtype, a.out.dtype, [&](auto t, auto r, auto o) {
        using T = decltype(t);
        using R = decltype(r);
        using O = decltype(o);
        const bool rounds = a.total && !std::is_same_v<R, float>;  // then a thread keeps a row as it is before
        int64_t failed = 0;
        mc::parallel(n, grain(dim), [&](int64_t begin, int64_t end) {
            Drawn drawn{a.seed ? *a.seed.as<uint64_t>() : 0, Rate(a.rate)};
            float* const whole = rounds ? static_cast<float*>(malloc(dim * sizeof(float))) : nullptr;
            if (rounds && !whole) return __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
            for (int64_t row = begin; row < end; row++) {
                const int64_t at = row * dim;
                if (a.total)
                    add(a.x.as<T>() + at, a.residual.as<R>() + at, a.total.as<R>() + at, whole, at, dim, a.seed ? &drawn : nullptr);
                const auto normed = [&](const auto* x) { return norm_row(x, w, b, a.out.as<O>() + at, dim, a.eps, a.centred); };
                Stats found = whole ? normed(whole) : normed(source.as<R>() + at);
                if (whole && found.far()) found = normed(source.as<R>() + at);
                if (a.centred) s[row] = found.mean, s[n + row] = found.rstd, s[2 * n + row] = found.shift;
                else s[row] = found.rstd;
            }
            free(whole);
        });
        if (failed) call.refuse("no memory for a row");
    });
}

MC_KERNEL(norm_backward) {
    const Backward a(call, F32);
    const Dtype branch = a.branch ? a.branch.dtype : a.total.dtype;
    if (!known(branch, a.total.dtype, a.grad.dtype)) call.refuse("no kernel for this mixture of dtypes");
    call.ready();
    const int64_t n = a.rows, dim = a.dim, chunks = a.lines, each_chunk = a.width;
    if (!dim) return;
    float* sums = a.partial.as<float>();
    const float *w = a.weight.as<float>(), *s = a.stats.as<float>();
    for_known(branch, a.total.dtype, a.grad.dtype, [&](auto t, auto r, auto o) {
        using T = decltype(t);
        using R = decltype(r);
        using O = decltype(o);
        mc::parallel(chunks, (grain(dim) * chunks + n) / (n + 1), [&](int64_t first, int64_t last) {
            Drawn drawn{a.seed ? *a.seed.as<uint64_t>() : 0, Rate(a.rate)};
            for (int64_t chunk = first; chunk < last; chunk++) {
                float *dw = sums + chunk * each_chunk, *db = a.dbias ? dw + dim : nullptr;
                memset(dw, 0, each_chunk * sizeof(float));
                for (int64_t row = chunk * n / chunks; row < (chunk + 1) * n / chunks; row++) {
                    const int64_t at = row * dim;
                    const Stats known = a.dbias ? Stats{s[row], s[n + row], s[2 * n + row]} : Stats{0.0f, s[row], 0.0f};
                    gradient_row(a.grad.as<O>() + at, a.also ? a.also.as<O>() + at : nullptr, a.more ? a.more.as<R>() + at : nullptr,
                                 a.total.as<R>() + at, w, a.stream.as<R>() + at, a.branch ? a.branch.as<T>() + at : nullptr, dw, db, at,
                                 dim, known, a.seed ? &drawn : nullptr);
                }
            }
        });
    });
    const auto reduce = [=](const float* from, float* to) {
        mc::parallel(dim, GRAIN / chunks + 1, [=](int64_t begin, int64_t end) {
            each(end - begin, [=](int64_t i, int lanes) {
                Total total;
                for (int64_t chunk = 0; chunk < chunks; chunk++) total.add(load_n(from + chunk * each_chunk + begin + i, lanes));
                store_n(to + begin + i, total.whole(), lanes);
            });
        });
    };
    reduce(sums, a.dweight.as<float>());
    if (a.dbias) reduce(sums + dim, a.dbias.as<float>());
}
