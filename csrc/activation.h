// The activations, written once, and what their kernels are given: a number V is 16 floats on the CPU and one on the GPU. `decay`,
// `halving`, `inverse`, `least`, `most` and `magnitude` are the device's own.
//
// With a = |x| each is max(x, 0) - a * small: gelu's small is Phi(-a); that of its tanh approximation and of silu is 1 / (1 + e^L), L being
// sqrt(8 / pi) (a + 0.044715 a^3) and a: nothing cancels, so that their tails are right too. The slope at -a is Phi(-a) - a phi(a) for
// gelu and s(-L) - a s(L) s(-L) L'(a), s(v) = 1 / (1 + e^-v), for the others; at a it is what that leaves of 1. NaN stays NaN, and
// infinities give the limits.
//
// A gated one may be followed by dropout: where a seed is given, act(gate) * up is masked and scaled before it is rounded (philox.h).
#pragma once
#include "philox.h"

#ifdef __CUDACC__
#define MC_MATH __device__ __forceinline__
#else
#define MC_MATH inline __attribute__((always_inline))
#endif

namespace {

enum Kind { GELU, GELU_TANH, SILU, RELU, KINDS };  // ops/activation.py counts them so

// FINE: to the last digits of fp32; otherwise to 1e-5, of which the rounding to 16 bits shows nothing.

// Phi(-a) = 2^-P(a): what P is off and what is rounded on the way are parts of Phi, and so little of gelu and its slope. Fitted by
// reweighted least squares in 40 digits: 1.5e-9 off in both at most; of Phi 1e-5 at 4, 5e-3 at 6. Beyond 10, P rises too fast. Two
// chains, of even and of odd powers, halve the wait. u = a * a.
template <class V>
MC_MATH V tail(V a, V u) {
    V even = u * -3.2887188941071236e-08f - 1.2176863946513136e-05f, odd = u * 9.765639763560798e-07f + 8.248122914563575e-05f;
    even = even * u - 0.00029563112711894024f, odd = odd * u + 2.2467974337439872e-05f;
    even = even * u + 0.006931825297840592f, odd = odd * u - 0.052438476565643884f;
    even = even * u - 0.45921970561316305f, odd = odd * u - 1.1511045241875775f;
    even = even * u - 1.0f;
    return halving(a * odd + even);
}

// Phi(-a) / phi(a) of t = 1 / (1 + 0.2316419 a), good to 7.5e-8 of Phi (Abramowitz & Stegun, 26.2.17): half the work of `tail`, since
// a slope wants phi(a) anyway, and its error follows Phi down.
template <class V>
MC_MATH V ratio(V t) {
    V sum = t * 1.330274429f - 1.821255978f;
    sum = sum * t + 1.781477937f;
    sum = sum * t - 0.356563782f;
    return (sum * t + 0.319381530f) * t;
}

// Of one number; the CPU has the same of many.
template <class V>
MC_MATH V by_sign(V x, V below, V above) {
    return x < V{} ? below : above;
}
template <class V>
MC_MATH V rising(V x) {  // 1, but 0 where x <= 0
    return x <= V{} ? V{} : V{} + 1.0f;
}

// The value at x and, where it is asked for, the slope, and `below`: that at -|x|, which with the slope at |x| makes 1.
template <int KIND, bool FINE, bool SLOPE, class V>
MC_MATH V activate(V x, V& slope, V& below) {
    const V zero{}, positive = most(0.0f, x);
    below = zero;
    if (KIND == RELU) {
        if (SLOPE) slope = rising(x);
        return positive;
    }
    const V a = least(100.0f, magnitude(x)), u = a * a;  // there all is decided, and no power of it overflows
    V small;
    if (KIND == GELU) {
        V bell = zero;  // phi(a)
        if (FINE && SLOPE) bell = halving(u * -0.7213475204444817f - 1.3257480647361593f);
        if (!FINE) bell = decay<FINE>(u * 0.5f) * 0.3989422804014327f;
        small = FINE ? tail(a, u) : bell * ratio(inverse<FINE>(a * 0.2316419f + 1.0f));
        if (SLOPE) below = small - a * bell;
    } else {
        constexpr float C = 1.5957691216057308f, C3 = 0.044715f * C;  // sqrt(8 / pi)
        const V e = decay<FINE>(KIND == GELU_TANH ? a * (u * C3 + C) : a), large = inverse<FINE>(e + 1.0f);
        small = e * large;
        if (SLOPE) below = small - small * (a * (KIND == GELU_TANH ? (u * (3 * C3) + C) * large : large));
    }
    if (SLOPE) slope = by_sign(x, below, 1.0f - below);
    return positive - a * small;
}

template <int KIND, bool FINE, bool SLOPE, class V>
MC_MATH V activate(V x, V& slope) {
    V below;
    return activate<KIND, FINE, SLOPE>(x, slope, below);
}
template <int KIND, bool FINE, class V>
MC_MATH V activate(V x) {
    V none;
    return activate<KIND, FINE, false>(x, none);
}

// ---- arguments, read in the order in which Python gives them

struct Forward {
    Array x, bias, y;
    int64_t dim, kind;

    explicit Forward(Call& call) {
        x = call.in("x", FLOATS), dim = x.shape.last();
        bias = call.maybe("bias", FLOATS, Shape{dim});
        kind = call.integer("kind", 0, KINDS - 1);
        y = call.out("y", x.dtype, x.shape);
    }
};

// `partial` is room for the sums of `parts` runs of rows, of which there may be `most`.
struct Backward {
    Array grad, x, bias, dx, partial, dbias;
    int64_t dim, kind, parts;

    Backward(Call& call, int64_t most) {
        grad = call.in("grad", FLOATS), x = call.in("x", grad.dtype, grad.shape), dim = x.shape.last();
        bias = call.maybe("bias", FLOATS, Shape{dim});
        kind = call.integer("kind", 0, KINDS - 1), parts = call.integer("parts", 1, most);
        dx = call.out("dx", x.dtype, x.shape);
        partial = call.maybe_out("partial", F32, Shape{parts, dim}), dbias = call.maybe_out("dbias", FLOATS, Shape{dim});
        if (partial.given != dbias.given) call.refuse("partial and dbias go together");
    }
};

struct Gated {
    Array gate, up, seed, y;
    int64_t kind;
    Rate rate;

    explicit Gated(Call& call) {
        gate = call.in("gate", FLOATS), up = call.in("up", gate.dtype, gate.shape);
        kind = call.integer("kind", 0, KINDS - 1);
        seed = call.maybe("seed", I64, Shape{1}), rate = Rate(call.real("p"));
        y = call.out("y", gate.dtype, gate.shape);
        call.ready();
    }
};

// dgate and dup are written, and y if it is given. What is not given of the rest stands where a result goes: gate in dgate, up in dup,
// grad in y.
struct GatedBackward {
    Array dgate, dup, y, grad, gate, up, seed;
    int64_t kind;
    Rate rate;
    bool in_place;

    explicit GatedBackward(Call& call) {
        dgate = call.inout("dgate", FLOATS), dup = call.inout("dup", dgate.dtype, dgate.shape);
        y = call.maybe_out("y", dgate.dtype, dgate.shape), grad = call.maybe("grad", dgate.dtype, dgate.shape);
        gate = call.maybe("gate", dgate.dtype, dgate.shape), up = call.maybe("up", dgate.dtype, dgate.shape);
        kind = call.integer("kind", 0, KINDS - 1);
        seed = call.maybe("seed", I64, Shape{1}), rate = Rate(call.real("p"));
        call.ready();
        if (gate.given != up.given) call.refuse("gate and up go together");
        if (!grad && !y) call.refuse("grad: None, and y too");
        in_place = !(grad && gate);
        if (!grad) grad = y;
        if (!gate) gate = dgate, up = dup;
    }
};

}  // namespace

// Run `body` with KIND being `kind`, a constant.
#define MC_FOR_KIND(kind, KIND, ...)         \
    switch (kind) {                          \
        case GELU: {                         \
            constexpr int KIND = GELU;       \
            __VA_ARGS__;                     \
            break;                           \
        }                                    \
        case GELU_TANH: {                    \
            constexpr int KIND = GELU_TANH;  \
            __VA_ARGS__;                     \
            break;                           \
        }                                    \
        case SILU: {                         \
            constexpr int KIND = SILU;       \
            __VA_ARGS__;                     \
            break;                           \
        }                                    \
        default: {                           \
            constexpr int KIND = RELU;       \
            __VA_ARGS__;                     \
            break;                           \
        }                                    \
    }
