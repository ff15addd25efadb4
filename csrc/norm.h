// LayerNorm and RMSNorm over the last axis, each with an optional residual add and dropout before it: what they are and what their
// kernels are given, for the CPU and for CUDA alike.
//
//     total = residual + dropout(x)           (without a residual it is x itself)
//     out = (total - mean) * rstd * weight + bias,  rstd = 1 / sqrt(mean((total - mean)^2) + eps)
//
// The total is kept in the residual's dtype, and normalised before it is rounded to that. As it is kept, which is all that the backward
// has, it is normalised where LayerNorm's mean is large beside the spread, which may be no more than what was rounded; and in CUDA's
// kernels that read a row again or ask for each dtype.
//
// RMSNorm has no mean and no bias. The normalised row is (total - mean) * rstd + shift: `mean` is a first one, in fp32; the mean of
// what is then left makes up for its rounding, which counts where a mean is large beside the deviation. `stats` holds mean, rstd
// and shift, each for all rows; RMSNorm's rstd alone: to write the others takes 1 % of its time where rows are short.
#pragma once
#include "kernel.h"

namespace {

// What is added and what comes out may be in half precision around a total in fp32; otherwise all three are one dtype. There are
// kernels for no other mixture (ops/_norm.py).
constexpr bool known(mc::Dtype x, mc::Dtype total, mc::Dtype out) {
    if (total != mc::F32) return x == total && out == total;
    return x == mc::F32 || out == mc::F32 || x == out;
}

// Both are read in the order in which Python gives them; `weights`: the dtypes that a kernel takes of weight and bias, which are
// alike.
struct Forward {
    mc::Array x, residual, weight, bias, seed, out, total, stats;
    int64_t rows, dim;
    double eps, rate;
    bool centred;

    Forward(mc::Call& call, uint32_t weights) {
        x = call.in("x", mc::FLOATS);
        rows = x.shape.rows(), dim = x.shape.last();
        residual = call.maybe("residual", mc::FLOATS, x.shape);
        weight = call.in("weight", weights, mc::Shape{dim});
        bias = call.maybe("bias", weight.dtype, mc::Shape{dim});
        eps = call.real("eps"), centred = call.flag("centred");
        seed = call.maybe("seed", mc::I64, mc::Shape{1}), rate = call.real("p");
        out = call.out("out", mc::FLOATS, x.shape);
        total = call.maybe_out("total", residual ? residual.dtype : x.dtype, x.shape);
        stats = call.out("stats", mc::F32, mc::Shape{centred ? 3 : 1, rows});
        if (static_cast<bool>(residual) != static_cast<bool>(total))
            call.refuse("a total is written where there is a residual, and only there");
    }
};

// `grad` and `also`: gradients of the norm from two who read it, which are added. `total`: what was normalised; `more`: the gradient that
// reaches it by another way. Gives `stream`, its gradient, and where wanted `branch`, that of what was dropped and added; `dbias` is
// none for RMSNorm. `partial` is room for `lines` of sums over rows.
struct Backward {
    mc::Array grad, also, total, more, weight, stats, seed, stream, branch, dweight, dbias, partial;
    int64_t rows, dim, lines, width;  // width: of a line, the sums for weight and bias
    double rate;

    Backward(mc::Call& call, uint32_t weights) {
        grad = call.in("grad", mc::FLOATS);
        rows = grad.shape.rows(), dim = grad.shape.last();
        also = call.maybe("also", grad.dtype, grad.shape);
        total = call.in("total", mc::FLOATS, grad.shape);
        more = call.maybe("more", total.dtype, grad.shape);
        weight = call.in("weight", weights, mc::Shape{dim});
        stats = call.in("stats", mc::F32);
        seed = call.maybe("seed", mc::I64, mc::Shape{1}), rate = call.real("p");
        stream = call.out("stream", total.dtype, grad.shape);
        branch = call.maybe_out("branch", mc::FLOATS, grad.shape);
        dweight = call.out("dweight", weight.dtype, mc::Shape{dim});
        dbias = call.maybe_out("dbias", weight.dtype, mc::Shape{dim});
        if (!(stats.shape == mc::Shape{dbias ? 3 : 1, rows})) call.refuse("stats: wanted 3 for a row, or 1 without a bias");
        partial = call.inout("partial", mc::F32);
        lines = partial.shape.rank ? partial.shape.at[0] : 0, width = dbias ? 2 * dim : dim;
        if (lines < 1 || lines > 65535 || !(partial.shape == mc::Shape{lines, dbias ? 2 : 1, dim}))
            call.refuse("partial: 1 to 65535 lines of sums are wanted");
    }
};

}  // namespace
