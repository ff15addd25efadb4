// The activations, written once: a number V is 16 floats on the CPU and one on the GPU. `decay`,
// `inverse`, `least`, `most` and `magnitude` are the device's own.
//
// gelu, its tanh approximation and silu are x * s(L(x)), where s(v) = 1 / (1 + e^-v) and L is odd: ln(Phi(x) / Phi(-x)),
// sqrt(8 / pi) (x + 0.044715 x^3), and x. With a = |x| and small = s(-L(a)) that is max(x, 0) - a * small: nothing cancels, so the
// tails are right too, where 1 + erf(x / sqrt 2) has no digit left from x = -5 on. The slope is s(L) + x s(L) s(-L) L'(x), which
// for gelu is Phi(x) + x phi(x). NaN stays NaN, and infinities give the limits.
#pragma once
#ifdef __CUDACC__
#define MC_MATH __device__ __forceinline__
#else
#define MC_MATH inline __attribute__((always_inline))
#endif

namespace {

enum Kind { GELU, GELU_TANH, SILU, RELU, KINDS };  // ops/activation.py counts them so

// FINE: to the last digits of fp32; otherwise to 1e-5, of which the rounding to 16 bits shows nothing.

// ln(Phi(a) / Phi(-a)) / a up to a = 5.5, by u = a^2; held constant from there on. Fitted by reweighted least squares in 40 digits:
// 2e-6 off in L at most and 1.5e-8 in gelu, or 1e-5 in both. Two chains, of even and of odd powers, halve the wait.
template <bool FINE, class V>
MC_MATH V logit(V u) {
    u = least(30.25f, u);
    if (FINE) {
        const V t = u * (2 / 30.25f) - 1.0f, tt = t * t;
        V even = tt * -0.0008555113923643108f + 0.0016496988295548372f, odd = tt * 0.0011304832094651328f - 0.0033990570999243436f;
        even = even * tt + 0.002299537195697461f, odd = odd * tt - 0.002969179638345797f;
        even = even * tt + 0.004196481353441151f, odd = odd * tt - 0.001157006273102259f;
        even = even * tt - 0.009294706742137263f, odd = odd * tt + 0.037160470961756405f;
        even = even * tt - 0.1286779729850165f, odd = odd * tt + 0.7876565407234893f;
        even = even * tt + 2.5448740074898186f;
        return odd * t + even;
    }
    const V uu = u * u;
    V even = uu * 9.980427942424264e-13f + 1.0684235718372292e-08f, odd = uu * -1.5737255942838146e-10f - 4.062640357460623e-07f;
    even = even * uu + 9.275880074710585e-06f, odd = odd * uu - 0.00011650055239442736f;
    even = even * uu - 5.670959217241034e-05f, odd = odd * uu + 0.07267270982265472f;
    even = even * uu + 1.5957579612731934f;
    return odd * u + even;
}

// The value at x and, where it is asked for, the slope.
template <int KIND, bool FINE, bool SLOPE, class V>
MC_MATH V activate(V x, V& slope) {
    const V zero{}, positive = most(0.0f, x);
    if (KIND == RELU) {
        if (SLOPE) slope = x <= zero ? zero : zero + 1.0f;
        return positive;
    }
    const V a = least(100.0f, magnitude(x));  // there all is decided, and no power of it overflows
    const V u = a * a;
    constexpr float C = 1.5957691216057308f, C3 = 0.044715f * C;  // sqrt(8 / pi)
    const V v = KIND == GELU ? a * logit<FINE>(u) : KIND == GELU_TANH ? a * (u * C3 + C) : a;
    const V e = decay<FINE>(v), large = inverse<FINE>(e + 1.0f), small = e * large;
    if (SLOPE) {
        const V part = KIND == GELU        ? decay<FINE>(u * 0.5f) * 0.3989422804014327f
                       : KIND == GELU_TANH ? (u * (3 * C3) + C) * small * large
                                           : small * large;
        slope = x < zero ? small - a * part : large + a * part;
    }
    return positive - a * small;
}

template <int KIND, bool FINE, class V>
MC_MATH V activate(V x) {
    V none;
    return activate<KIND, FINE, false>(x, none);
}

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
