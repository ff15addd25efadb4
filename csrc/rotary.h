// What the kernels of rotary positions are given, for the CPU and for CUDA alike: pairs of channels turned by the angles of their token,
// forth or (`back`: the gradient) back.
//
// y is b s h d; cos and sin, (1|b) s 1 r/2, hold an angle for each pair of the first r channels; the others pass. Without an x the
// rotation is in place: every pair is read before it is written.
#pragma once
#include "kernel.h"

namespace {

// The arguments, read in the order in which Python gives them.
struct Rotary {
    mc::Array y, x, cos, sin;
    int64_t tokens, heads, dim, pairs, period;  // period: tokens after which the angles begin anew
    bool interleaved;
    float way;  // 1, or -1: back
    explicit Rotary(mc::Call& call) {
        y = call.inout("y", mc::FLOATS);
        if (y.shape.rank != 4) call.refuse("y: %d dimensions; wanted b s h d", y.shape.rank);
        const int64_t b = y.shape.at[0], s = y.shape.at[1];
        tokens = b * s, heads = y.shape.at[2], dim = y.shape.at[3];
        x = call.maybe("x", y.dtype, y.shape);
        cos = call.in("cos", mc::F32);
        pairs = cos.shape.last();
        if (cos.shape.at[0] != b && cos.shape.at[0] != 1) call.refuse("cos: for another batch than y");
        if (!(cos.shape == mc::Shape{cos.shape.at[0], s, 1, pairs}) || 2 * pairs > dim)
            call.refuse("cos: wanted (1|b) s 1 r/2, r being at most d");
        period = cos.shape.at[0] == 1 ? s : tokens;
        sin = call.in("sin", mc::F32, cos.shape);
        interleaved = call.flag("interleaved"), way = call.flag("back") ? -1.0f : 1.0f;
        call.ready();
    }
};

}  // namespace
