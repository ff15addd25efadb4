// What the kernels of dropout with an optional residual are given, for the CPU and for CUDA alike: out = residual + x * mask / (1 - p).
// The mask is counter-based (philox.h) and never stored; the gradient of x is the same kernel on the gradient, without a residual, in
// the dtype of x.
#pragma once
#include "kernel.h"
#include "philox.h"

namespace {

// The arguments, read in the order in which Python gives them.
struct Dropout {
    mc::Array x, residual, seed, y;
    Rate rate;
    explicit Dropout(mc::Call& call) {
        x = call.in("x", mc::FLOATS);
        residual = call.maybe("residual", mc::FLOATS, x.shape);
        seed = call.in("seed", mc::I64, mc::Shape{1});
        rate = Rate(call.real("p"));
        y = residual ? call.out("y", residual.dtype, x.shape) : call.out("y", mc::FLOATS, x.shape);
        call.ready();
    }
};

}  // namespace
