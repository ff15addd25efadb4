// A matrix in rows of another length, and of another number: what does not fit is cut off, what is not there is zero.
#pragma once
#include "kernel.h"

namespace {

struct Resize {
    mc::Array x, y;
    int64_t rows, cols;  // of y
    explicit Resize(mc::Call& call) {
        x = call.in("x", mc::FLOATS | mc::U8 | mc::I8);
        if (x.shape.rank != 2) call.refuse("x: wanted (rows, cols)");
        rows = call.integer("rows", 0, INT64_MAX / 4);
        cols = call.integer("cols", 0, INT64_MAX / 4);
        y = call.out("y", x.dtype, mc::Shape{rows, cols});
        call.ready();
    }
    int size() const { return x.dtype == mc::F32 ? 4 : x.dtype == mc::F16 || x.dtype == mc::BF16 ? 2 : 1; }  // bytes of an element
};

}  // namespace
