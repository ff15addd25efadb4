// The activations, written once: a number V is 16 floats on the CPU and one on the GPU. `decay`,
// `inverse`, `least`, `most` and `magnitude` are the device's own.
//
// With a = |x| each is max(x, 0) - a * small: gelu's small is Phi(-a); that of its tanh approximation and of silu is 1 / (1 + e^L), L being sqrt(8 / pi) (a + 0.044715 a^3) and a: nothing cancels, so that their tails are right too. The slope is
// Phi(x) + x phi(x) for gelu and s(L) + x s(L) s(-L) L'(x), s(v) = 1 / (1 + e^-v), for the others. NaN stays NaN, and infinities
// give the limits.
#pragma once
#ifdef __CUDACC__
#define MC_MATH __device__ __forceinline__
#else
#define MC_MATH inline __attribute__((always_inline))
#endif

namespace {

enum Kind { GELU, GELU_TANH, SILU, RELU, KINDS };  // ops/activation.py counts them so

// FINE: to the last digits of fp32; otherwise to 1e-5, of which the rounding to 16 bits shows nothing.

// Phi(-a) for 0 <= a <= 5.5, with a zero there. Fitted by reweighted least squares in 30 digits: 1.2e-7 off in gelu at most. Two
// chains, of even and of odd powers, halve the wait.
template <class V>
MC_MATH V tail(V a) {
    const V t = a * (2 / 5.5f) - 1.0f, tt = t * t;
    V odd = tt * -0.0007657443638890982f + 0.0026051353197544813f, even = tt * 0.005886617582291365f - 0.030751146376132965f;
    odd = odd * tt + 0.010792878456413746f, even = even * tt + 0.06365922838449478f;
    odd = odd * tt - 0.0687941163778305f, even = even * tt - 0.03607715666294098f;
    odd = odd * tt + 0.12694624066352844f, even = even * tt - 0.09082065522670746f;
    odd = odd * tt - 0.039469193667173386f, even = even * tt + 0.13759583234786987f;
    odd = odd * tt - 0.13428418338298798f, even = even * tt + 0.07253030687570572f;
    odd = odd * tt - 0.022028177976608276f, even = even * tt + 0.0029797698371112347f;
    return (odd * t + even) * (1.0f - t);
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

// The value at x and, where it is asked for, the slope.
template <int KIND, bool FINE, bool SLOPE, class V>
MC_MATH V activate(V x, V& slope) {
    const V zero{}, positive = most(0.0f, x);
    if (KIND == RELU) {
        if (SLOPE) slope = x <= zero ? zero : zero + 1.0f;
        return positive;
    }
    const V a = least(100.0f, magnitude(x)), u = a * a;  // there all is decided, and no power of it overflows
    if (KIND == GELU) {
        const V near = FINE ? least(5.5f, a) : a;
        V bell = zero;
        if (SLOPE || !FINE) bell = decay<FINE>(u * 0.5f) * 0.3989422804014327f;
        const V small = FINE ? tail(near) : bell * ratio(inverse<FINE>(a * 0.2316419f + 1.0f));
        if (SLOPE) {
            const V part = a * bell;
            slope = x < zero ? small - part : (1.0f - small) + part;
        }
        return positive - near * small;
    }
    constexpr float C = 1.5957691216057308f, C3 = 0.044715f * C;  // sqrt(8 / pi)
    const V e = decay<FINE>(KIND == GELU_TANH ? a * (u * C3 + C) : a), large = inverse<FINE>(e + 1.0f), small = e * large;
    if (SLOPE) {
        const V part = a * (KIND == GELU_TANH ? (u * (3 * C3) + C) * small * large : small * large);
        slope = x < zero ? small - part : large + part;
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
