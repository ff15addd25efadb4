// What NF4 and int8 codes mean (modelcenter/ops/quantize.py has the formulas) and what their kernels are given, for the CPU and for
// CUDA alike. Of weights (.. cols) there are in NF4 (`four`) codes (.. cols/2), the earlier weight of a pair in the high half of a byte,
// and a scale in fp32 for each GROUP of a row; in int8 codes (.. cols) and scales (..).
#pragma once
#include "kernel.h"

namespace {

constexpr int GROUP = 64;             // NF4 weights that share a scale; groups end with a row
constexpr float TINY = 0x1p-119f;     // below it a scale is 0: a step of 1/127 of it would be subnormal, and may be flushed
constexpr float HIGH = 0x1.0204p-7f;  // HIGH + LOW is 1/127, and q * HIGH + q * LOW is q / 127, rounded once, for every int8 q,
constexpr float LOW = 0x1.020408p-28f;  // whether or not the compiler fuses the sum

// Dettmers et al., 2023, appendix E
#define MC_NF4_LEVELS                                                                                                             \
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,       \
        -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,      \
        0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f

// The middle of two levels, rounded down: a float is above it exactly if it is nearer to the upper level; a tie takes the lower
#define MC_NF4_MIDDLES                                                                                                            \
    -0x1.b239b2p-1f, -0x1.38a4e2p-1f, -0x1.d70900p-2f, -0x1.5bd4eep-2f, -0x1.e079dap-3f, -0x1.1a7178p-3f, -0x1.74f0e2p-5f,        \
        0x1.45f5fep-5f, 0x1.ec90c4p-4f, 0x1.a0cfc0p-3f, 0x1.2b05a8p-2f, 0x1.8ea7f2p-2f, 0x1.00da06p-1f, 0x1.491b5ep-1f,           \
        0x1.b913b2p-1f

constexpr uint32_t ZERO_CODE = 7;  // what the half of a last byte that no weight uses holds

// ---- arguments, read in the order in which Python gives them

inline mc::Shape codes_of(mc::Shape weights, bool four) {
    if (four) weights.at[weights.rank - 1] = (weights.last() + 1) / 2;
    return weights;
}
inline mc::Shape scales_of(mc::Shape weights, bool four) {
    if (four) weights.at[weights.rank - 1] = (weights.last() + GROUP - 1) / GROUP;
    else weights.rank--;
    return weights;
}

struct Quantize {
    mc::Array x, codes, scales;
    Quantize(mc::Call& call, bool four) {
        x = call.in("x", mc::FLOATS);
        if (!x.shape.rank) call.refuse("x: a number; wanted a tensor");
        codes = call.out("codes", four ? mc::U8 : mc::I8, codes_of(x.shape, four));
        scales = call.out("scales", mc::F32, scales_of(x.shape, four));
        call.ready();
    }
};

struct Dequantize {
    mc::Array codes, scales, y;
    Dequantize(mc::Call& call, bool four) {
        codes = call.in("codes", four ? mc::U8 : mc::I8);
        if (!codes.shape.rank) call.refuse("codes: a number; wanted a tensor");
        mc::Shape weights = codes.shape;
        if (four) weights.at[weights.rank - 1] = call.integer("cols", 0, INT64_MAX / 4);
        if (!(codes.shape == codes_of(weights, four))) call.refuse("codes: wanted (.., cols / 2), rounded up");
        scales = call.in("scales", mc::F32, scales_of(weights, four));
        y = call.out("y", mc::FLOATS, weights);
        call.ready();
    }
};

// y (n rows) = x (n cols) @ W^T + bias
struct Product {
    static constexpr int FEW = 8;  // rows of activations, at most
    mc::Array x, codes, scales, bias, y;
    int64_t n, rows, cols;
    Product(mc::Call& call, bool four, uint32_t dtypes) {
        x = call.in("x", dtypes);
        if (x.shape.rank != 2 || x.shape.at[0] > FEW) call.refuse("x: wanted (n, cols), n at most %d", FEW);
        n = x.shape.at[0], cols = x.shape.at[1];
        codes = call.in("codes", four ? mc::U8 : mc::I8);
        const int64_t bytes = codes_of(x.shape, four).last();
        if (codes.shape.rank != 2 || codes.shape.at[1] != bytes) call.refuse("codes: wanted (rows, %lld)", static_cast<long long>(bytes));
        rows = codes.shape.at[0];
        scales = call.in("scales", mc::F32, scales_of(mc::Shape{rows, cols}, four));
        bias = call.maybe("bias", x.dtype, mc::Shape{rows});
        y = call.out("y", x.dtype, mc::Shape{n, rows});
        call.ready();
    }
};

}  // namespace
