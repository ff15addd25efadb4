// What the kernels of rows of a table by number are given, for the CPU and for CUDA alike. That of the gradient is given ids as
// they are, and room to sort them in, on the CPU, and sorted ones in CUDA: each reads its own.
#pragma once
#include "kernel.h"

namespace {

// The arguments, read in the order in which Python gives them.
struct Embedding {
    mc::Array ids, table, out;
    int64_t n, vocab, dim, bytes;  // bytes: of a row
    explicit Embedding(mc::Call& call) {
        ids = call.in("ids", mc::I64);
        table = call.in("table", mc::FLOATS);
        if (table.shape.rank != 2) call.refuse("table: %d dimensions; wanted 2", table.shape.rank);
        n = ids.shape.count(), vocab = table.shape.at[0], dim = table.shape.at[1];
        bytes = dim * (table.dtype == mc::F32 ? 4 : 2);
        out = call.out("out", table.dtype, mc::Shape{n, dim});
        call.ready();
    }
};

}  // namespace
