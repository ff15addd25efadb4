// Cross entropy of rows of logits (n, stride), of which the first `vocab` columns count: what it is and what its kernels are given, for
// the CPU and for CUDA alike.
//
//     loss_i = lse - (1 - smoothing) x[label] - smoothing / vocab * sum_j x[j] + z lse^2,   lse = log sum_j exp x[j]
//     dloss_i / dx[j] = exp(x[j] - lse) (1 + 2 z lse) - smoothing / vocab - (1 - smoothing) [j = label]
//
// A label of -100 gives zero for both.
#pragma once
namespace {

constexpr int64_t IGNORE = -100;
constexpr float LOWEST = -3.402823466e38f;  // not -inf: the difference of two infinities is no number

template <class F>
struct Loss {
    F smoothing, z;
};

enum Pass { FORWARD, BOTH, BACKWARD };  // both: the gradient over the logits

// Read in the order in which Python gives them; numbers are kept as F.
template <Pass PASS, class F>
struct Arguments {
    Array logits, labels, lse, grad, losses, out;
    int64_t n, stride, vocab;
    Loss<F> loss;
    F scale = 1;

    explicit Arguments(Call& call) {
        logits = PASS == BOTH ? call.inout("logits", FLOATS) : call.in("logits", FLOATS);
        if (logits.shape.rank != 2) call.refuse("logits: %d dimensions; wanted 2", logits.shape.rank);
        n = logits.shape.at[0], stride = vocab = logits.shape.at[1];
        labels = call.in("labels", I64, Shape{n});
        if (PASS != BACKWARD) vocab = call.integer("vocab", n ? 1 : 0, stride);
        if (PASS == BACKWARD) lse = call.in("lse", F32, Shape{n}), grad = call.in("grad", F32, Shape{});
        loss.smoothing = static_cast<F>(call.real("smoothing")), loss.z = static_cast<F>(call.real("z"));
        if (PASS == BOTH) scale = static_cast<F>(call.real("scale"));
        if (PASS == BACKWARD) out = call.out("out", logits.dtype, logits.shape);
        else losses = call.out("losses", F32, Shape{n});
        if (PASS == FORWARD) lse = call.maybe_out("lse", F32, Shape{n});
        call.ready();
    }
};

}  // namespace
