// Activations with a bias added first, act(x + bias), and gated ones, act(gate) * up; the backward computes all of it again.
//
// The gradient of the bias is a sum over rows: the rows are cut into the parts of `partial` (its first axis; how many depends on
// the shape alone), each part is summed in order, then the parts are.
//
// Everything passes through pieces of fp32 in the first cache: the loops that compute know neither dtypes nor the ends of rows.
#include "random.h"
#include "simd.h"

namespace {

MC_INLINE vf magnitude(vf x) { return bits_to_float(float_to_bits(x) & 0x7FFFFFFFu); }
#if defined(__AVX512F__)  // both: NaN if x is
MC_INLINE vf least(float limit, vf x) { return reinterpret_cast<vf>(_mm512_min_ps(_mm512_set1_ps(limit), reinterpret_cast<__m512>(x))); }
MC_INLINE vf most(float limit, vf x) { return reinterpret_cast<vf>(_mm512_max_ps(_mm512_set1_ps(limit), reinterpret_cast<__m512>(x))); }
#else
MC_INLINE vf least(float limit, vf x) { return vmin(all(limit), x); }
MC_INLINE vf most(float limit, vf x) { return vmax(all(limit), x); }
#endif

MC_INLINE vf by_sign(vf x, vf below, vf above) { return choose<pf>(x, below, above, [](pf x) { return x < 0.0f; }); }
MC_INLINE vf rising(vf x) { return choose<pf>(x, vf{}, all(1.0f), [](pf x) { return x <= 0.0f; }); }

// e^-x for x >= 0; held constant from 86 on, where it is 4e-38. 2^n is put into the exponent of the rest, fitted as `logit` is.
template <bool FINE>
MC_INLINE vf decay(vf x) {
    const vf y = least(86.0f, x);
    const vf shifted = y * -1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer n in the low bits
    const vf n = shifted - 12582912.0f, r = n * -0.693147180559945f - y;
    vf p;
    if (FINE) {
        p = r * 0.0013843267224729061f + 0.008374487981200218f;
        p = p * r + 0.04166802391409874f;
        p = p * r + 0.1666642725467682f;
        p = p * r + 0.4999999403953552f;
        p = p * r + 1.0f;
    } else {
        p = r * 0.041512489318847656f + 0.1678844839334488f;
        p = p * r + 0.5000306367874146f;
        p = p * r + 0.9999663233757019f;
    }
    p = p * r + 1.0f;
    return bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));
}

// 2^x for x <= 0, and no less than 2^-126
MC_INLINE vf halving(vf x) {
    const vf y = most(-126.0f, x), shifted = y + 12582912.0f, r = y - (shifted - 12582912.0f);
    vf p = r * 0.0001535335904918611f + 0.0013398875016719103f;
    p = p * r + 0.00961843691766262f;
    p = p * r + 0.055503323674201965f;
    p = p * r + 0.24022647738456726f;
    p = p * r + 0.6931471824645996f;
    p = p * r + 1.0f;
    return bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));
}

// 1 / x for x from 1 on
template <bool FINE>
MC_INLINE vf inverse(vf x) {
#if defined(__AVX512F__)
    const vf r = reinterpret_cast<vf>(_mm512_rcp14_ps(reinterpret_cast<__m512>(x)));  // 6e-5 off, its square after one step of Newton's
    return r + r * (1.0f - x * r);
#else
    return 1.0f / x;
#endif
}

}  // namespace

#include "activation.h"

namespace {

constexpr int64_t GRAIN = 1 << 15;  // elements a thread is worth waking for
constexpr int64_t PIECE = 1 << 10;  // elements at a time
constexpr int64_t ROWS = 16;        // at a time, where they share a bias

typedef float Piece[PIECE] __attribute__((aligned(64)));

// n elements of `array` from `at` on, as fp32 in whole vectors: in place where they are, otherwise in `piece`
template <class T>
void widen(const T* p, float* piece, int64_t n) {
    each(n, [&](int64_t i, int lanes) { store(piece + i, load_n(p + i, lanes)); });
}
const float* read(const Array& array, int64_t at, int64_t n, float* piece) {
    if (array.dtype == F32 && n % LANES == 0) return array.as<float>() + at;
    MC_FOR_FLOAT(array.dtype, T, widen(array.as<T>() + at, piece, n))
    return piece;
}
template <class T>
void narrow(T* p, const float* piece, int64_t n) {
    each(n, [&](int64_t i, int lanes) { store_n(p + i, load(piece + i), lanes); });
}
// where n elements are to be computed that `write` then puts to `array` from `at` on
float* room(const Array& array, int64_t at, int64_t n, float* piece) {
    return array.dtype == F32 && n % LANES == 0 ? array.as<float>() + at : piece;
}
void write(const Array& array, int64_t at, int64_t n, const float* piece) {
    if (array.dtype == F32 && n % LANES == 0) return;
    MC_FOR_FLOAT(array.dtype, T, narrow(array.as<T>() + at, piece, n))
}

// Each is told n, rounded up to whole vectors; `bias` and `sums` may be null.
template <int KIND, bool FINE>
void values(const float* x, const float* bias, float* y, int64_t n) {
    if (bias)
        for (int64_t i = 0; i < n; i += LANES) store(y + i, activate<KIND, FINE>(load(x + i) + load(bias + i)));
    else
        for (int64_t i = 0; i < n; i += LANES) store(y + i, activate<KIND, FINE>(load(x + i)));
}
template <int KIND, bool FINE>
void slopes(const float* grad, const float* x, const float* bias, float* dx, float* sums, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        vf h = load(x + i), slope;
        if (bias) h += load(bias + i);
        activate<KIND, FINE, true>(h, slope);
        const vf d = load(grad + i) * slope;
        store(dx + i, d);
        if (sums) store(sums + i, load(sums + i) + d);
    }
}
template <int KIND, bool FINE>
void gated_values(const float* gate, const float* up, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store(y + i, activate<KIND, FINE>(load(gate + i)) * load(up + i));
}
// y, the activation's own result, may be null.
template <int KIND, bool FINE>
void gated_slopes(const float* grad, const float* gate, const float* up, float* dgate, float* dup, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        const vf g = load(grad + i), w = load(up + i);
        vf slope;
        const vf value = activate<KIND, FINE, true>(load(gate + i), slope);
        store(dgate + i, g * slope * w);  // in this order a slope of 0 is a gradient of 0, however large the rest
        store(dup + i, g * value);
        if (y) store(y + i, value * w);
    }
}

// The n numbers of a piece that begins at element `at`, as dropout leaves them.
void drop(const float* from, float* to, int64_t at, int64_t n, const Array& seed, const Rate& rate) {
    static_assert(PIECE % BLOCK == 0);
    for (int64_t first = 0; first < n; first += BLOCK) {
        uint16_t random[BLOCK];
        draw(random, (at + first) / BLOCK, *seed.as<uint64_t>());
        for (int64_t i = first; i < n && i < first + BLOCK; i += LANES)
            store(to + i, masked(load(from + i) * rate.scale, random + (i - first), rate.threshold));
    }
}

#define MC_FOR_LOOP(dtype, kind, KIND, FINE, ...)      \
    if (dtype == mc::F32) {                            \
        constexpr bool FINE = true;                    \
        MC_FOR_KIND(kind, KIND, __VA_ARGS__)           \
    } else {                                           \
        constexpr bool FINE = false;                   \
        MC_FOR_KIND(kind, KIND, __VA_ARGS__)           \
    }

constexpr int64_t whole(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// f(first row, row after the last, column, columns) for `groups` groups of rows and every piece of their columns
template <class F>
void tiles(int64_t rows, int64_t dim, int64_t groups, F f) {
    if (!rows || !dim) return;
    const int64_t height = (rows + groups - 1) / groups, pieces = (dim + PIECE - 1) / PIECE;
    const int64_t area = height * (dim < PIECE ? dim : PIECE);
    mc::parallel(groups * pieces, (GRAIN + area - 1) / area, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t first = i / pieces * height, last = first + height, column = i % pieces * PIECE;
            if (first < rows) f(first, last < rows ? last : rows, column, dim - column < PIECE ? dim - column : PIECE);
        }
    });
}

}  // namespace

MC_KERNEL(activation) {
    const Forward a(call);
    call.ready();
    void (*loop)(const float*, const float*, float*, int64_t) = nullptr;
    MC_FOR_LOOP(a.x.dtype, a.kind, KIND, FINE, loop = values<KIND, FINE>)
    const int64_t rows = a.bias ? a.x.shape.rows() : 1, width = a.bias ? a.dim : a.x.shape.count();
    tiles(rows, width, (rows + ROWS - 1) / ROWS, [&](int64_t row, int64_t last, int64_t column, int64_t n) {
        Piece in, out, added;
        const float* bias = a.bias ? read(a.bias, column, n, added) : nullptr;
        for (; row < last; row++) {
            const int64_t at = row * width + column;
            float* made = room(a.y, at, n, out);
            loop(read(a.x, at, n, in), bias, made, whole(n));
            write(a.y, at, n, made);
        }
    });
}

MC_KERNEL(activation_backward) {
    const Backward a(call, INT64_MAX);
    call.ready();
    void (*loop)(const float*, const float*, const float*, float*, float*, int64_t) = nullptr;
    MC_FOR_LOOP(a.x.dtype, a.kind, KIND, FINE, loop = slopes<KIND, FINE>)
    const bool flat = !a.bias && !a.partial;
    const int64_t rows = flat ? 1 : a.x.shape.rows(), width = flat ? a.x.shape.count() : a.dim;
    const int64_t height = (rows - 1) / a.parts + 1;  // of a part; `parts` may be any number where there is no sum
    tiles(rows, width, a.partial ? a.parts : (rows + ROWS - 1) / ROWS, [&](int64_t row, int64_t last, int64_t column, int64_t n) {
        Piece in, given, out, added, sums;
        const float* bias = a.bias ? read(a.bias, column, n, added) : nullptr;
        float* const to = a.partial ? a.partial.as<float>() + row / height * a.dim + column : nullptr;
        if (to) memset(sums, 0, sizeof sums);
        for (; row < last; row++) {
            const int64_t at = row * width + column;
            float* made = room(a.dx, at, n, out);
            loop(read(a.grad, at, n, given), read(a.x, at, n, in), bias, made, to ? sums : nullptr, whole(n));
            write(a.dx, at, n, made);
        }
        if (to) memcpy(to, sums, n * sizeof(float));
    });
    if (!a.partial) return;
    tiles(1, a.dim, 1, [&](int64_t, int64_t, int64_t column, int64_t n) {
        Piece in, total, rest;
        memset(total, 0, sizeof total), memset(rest, 0, sizeof rest);
        const auto at = [&](int64_t i) { return Total{load(total + i), load(rest + i)}; };
        for (int64_t part = 0; part * height < rows; part++) {
            const float* sums = read(a.partial, part * a.dim + column, n, in);
            for (int64_t i = 0; i < whole(n); i += LANES) {
                Total sum = at(i);
                sum.add(load(sums + i));
                store(total + i, sum.sum), store(rest + i, sum.rest);
            }
        }
        for (int64_t i = 0; i < whole(n); i += LANES) store(total + i, at(i).whole());
        MC_FOR_FLOAT(a.dbias.dtype, T, narrow(a.dbias.as<T>() + column, total, n))
    });
}

MC_KERNEL(gated) {
    const Gated z(call);
    void (*loop)(const float*, const float*, float*, int64_t) = nullptr;
    MC_FOR_LOOP(z.gate.dtype, z.kind, KIND, FINE, loop = gated_values<KIND, FINE>)
    tiles(1, z.gate.shape.count(), 1, [&](int64_t, int64_t, int64_t at, int64_t n) {
        Piece a, b, out;
        float* made = room(z.y, at, n, out);
        loop(read(z.gate, at, n, a), read(z.up, at, n, b), made, whole(n));
        if (z.seed) drop(made, made, at, whole(n), z.seed, z.rate);
        write(z.y, at, n, made);
    });
}

MC_KERNEL(gated_backward) {
    const GatedBackward z(call);
    void (*loop)(const float*, const float*, const float*, float*, float*, float*, int64_t) = nullptr;
    MC_FOR_LOOP(z.dgate.dtype, z.kind, KIND, FINE, loop = gated_slopes<KIND, FINE>)
    tiles(1, z.dgate.shape.count(), 1, [&](int64_t, int64_t, int64_t at, int64_t n) {
        Piece g, a, b, da, db, out;
        float *one = room(z.dgate, at, n, da), *two = room(z.dup, at, n, db), *three = z.y ? room(z.y, at, n, out) : nullptr;
        const float* grad = read(z.grad, at, n, g);
        if (z.seed) drop(grad, g, at, whole(n), z.seed, z.rate), grad = g;
        loop(grad, read(z.gate, at, n, a), read(z.up, at, n, b), one, two, three, whole(n));
        if (z.seed && z.y) drop(three, three, at, whole(n), z.seed, z.rate);
        write(z.dgate, at, n, one);
        write(z.dup, at, n, two);
        if (z.y) write(z.y, at, n, three);
    });
}
