// What AdamW is, the same on every device; modelcenter/optim/adamw.py has the formula and the format of the state.
//
// The two files that include this are compiled without contraction of a * b + c (setup.py), so that the CPU's instruction sets, CUDA
// and the reference in torch agree to the last bit. A call updates many tensors, cut into chunks, which are the unit of work.
#pragma once
#include <cmath>

#include "philox.h"

namespace {

using mc::F64;
using mc::List;

constexpr int64_t CHUNK = 8192;   // elements that are updated together; optim/adamw.py has the same numbers
constexpr int64_t PIECE = 32768;  // elements whose squares are added together
constexpr int64_t BLOCK8 = 128;   // elements of an 8-bit moment that share a scale

// A parameter in the table of a call, a buffer of 64-bit words that Python allocates on the device.
struct Item {
    void *p, *m, *v, *copy;  // copy: the parameter again, in half precision; or null
    const void* g;
    float *step, *m_scale, *v_scale;  // the scales of 8-bit moments; or null
    int64_t n, first;                 // elements; the number of its first chunk
    uint64_t key;                     // of its random bits in this step
    float size, root;                 // lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t)
};
constexpr int64_t WORDS = 12;
static_assert(sizeof(Item) == 8 * WORDS, "what optim/adamw.py allocates");

struct Numbers {
    double lr, beta1, beta2;
    uint64_t seed, number;                 // number: of the call's first parameter in this step
    float rise1, keep2, rise2, eps, keep;  // 1 - beta1, beta2, 1 - beta2, eps, 1 - lr * weight_decay
    bool stochastic;                       // bf16 is rounded up or down at random, so that what is written is right in the mean
};

// The arguments of `adamw`, read in the order in which Python gives them.
struct Arguments {
    Array clip, table;
    List p, g, m, v, m_scale, v_scale, copy, step;
    Numbers numbers;
    int64_t chunks = 0;

    Arguments(Call& call, uint32_t moments) {
        clip = call.in("clip", F32, Shape{2});
        p = call.list("params", F32 | BF16, true);
        g = call.list("grads", p.dtype == BF16 ? F32 | BF16 : FLOATS, false);  // those that there are
        m = call.list("exp_avgs", moments, true);
        v = call.list("exp_avg_sqs", m.dtype == I8 ? U8 : m.dtype, true);
        m_scale = call.list("exp_avg_scales", F32, true);
        v_scale = call.list("exp_avg_sq_scales", F32, true);
        copy = call.list("copies", F16 | BF16, true);
        step = call.list("steps", F32, true);
        table = call.out("table", I64, Shape{p.n * WORDS});
        Numbers& c = numbers;
        c.lr = call.real("lr"), c.beta1 = call.real("beta1"), c.beta2 = call.real("beta2");
        c.eps = static_cast<float>(call.real("eps"));
        c.keep = static_cast<float>(1 - c.lr * call.real("weight_decay"));
        c.rise1 = static_cast<float>(1 - c.beta1), c.keep2 = static_cast<float>(c.beta2), c.rise2 = static_cast<float>(1 - c.beta2);
        c.seed = static_cast<uint64_t>(call.integer("seed")), c.number = static_cast<uint64_t>(call.integer("number"));
        c.stochastic = call.flag("stochastic");
        const bool scaled = m.dtype == I8;
        expect(call, "grads", g, true), expect(call, "exp_avgs", m, true), expect(call, "exp_avg_sqs", v, true);
        expect(call, "copies", copy, copy.n > 0);
        if (copy.n && p.dtype != F32) call.refuse("copies are of float32 params");
        if (step.n != p.n || (scaled ? p.n : 0) != m_scale.n || m_scale.n != v_scale.n) call.refuse("lists of different lengths");
        for (int64_t i = 0; i < p.n; i++) {
            const int64_t blocks = (p[i].count + BLOCK8 - 1) / BLOCK8;
            if (step[i].count != 1) call.refuse("steps: one number each is wanted");
            if (scaled && (m_scale[i].count != blocks || v_scale[i].count != blocks))
                call.refuse("scales: a number for each %lld elements is wanted", static_cast<long long>(BLOCK8));
            chunks += (p[i].count + CHUNK - 1) / CHUNK;
        }
        if (chunks > INT32_MAX) call.refuse("more than 2^44 elements");
    }
    Item item(int64_t i, int64_t first) const {
        Item item{};
        item.p = p[i].data, item.g = g[i].data, item.m = m[i].data, item.v = v[i].data, item.step = static_cast<float*>(step[i].data);
        if (copy.n) item.copy = copy[i].data;
        if (m_scale.n) item.m_scale = static_cast<float*>(m_scale[i].data), item.v_scale = static_cast<float*>(v_scale[i].data);
        item.n = p[i].count, item.first = first;
        return item;
    }

private:
    void expect(Call& call, const char* name, const List& list, bool wanted) const {
        if (list.n != (wanted ? p.n : 0)) call.refuse("%s: another number of tensors than params", name);
        for (int64_t i = 0; i < list.n; i++)
            if (list[i].count != p[i].count) call.refuse("%s: another number of elements than its parameter", name);
    }
};

// The arguments of `adamw_squares`.
struct SquaresArguments {
    Array total, partial, table;
    List grads;
    int64_t pieces = 0;

    explicit SquaresArguments(Call& call) {
        total = call.out("total", F64, Shape{1});
        grads = call.list("grads", FLOATS, false);
        for (int64_t i = 0; i < grads.n; i++) pieces += (grads[i].count + PIECE - 1) / PIECE;
        if (pieces > INT32_MAX) call.refuse("more than 2^46 elements");
        partial = call.out("partial", F64, Shape{pieces});
        table = call.out("table", I64, Shape{grads.n * WORDS});
    }
    Item item(int64_t i, int64_t first) const {
        Item item{};
        item.g = grads[i].data, item.n = grads[i].count, item.first = first;
        return item;
    }
};

// The arguments of `adamw_clip`, which are those of `verdict`.
struct ClipArguments {
    Array clip, totals, scale;
    float max_norm;

    explicit ClipArguments(Call& call) {
        clip = call.out("clip", F32, Shape{2}), totals = call.in("totals", F64);
        scale = call.maybe("scale", F32, Shape{1}), max_norm = static_cast<float>(call.real("max_norm"));
    }
};

// One more step of an item: all that depends on the step. SplitMix64 (Steele et al., 2014) makes a key of seed, number and step.
MC_BOTH void tick(Item& item, const Numbers& c, int64_t index) {
    *item.step += 1.0f;
    const double t = *item.step;
    item.size = static_cast<float>(c.lr / (1 - pow(c.beta1, t)));
    item.root = static_cast<float>(1 / sqrt(1 - pow(c.beta2, t)));
    uint64_t z = c.seed + 0x9E3779B97F4A7C15u * (c.number + index + 1) + 0xD1B54A32D192ED03u * static_cast<uint64_t>(t);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    item.key = z ^ (z >> 31);
}

// The 16 random bits of m, p and v out of an element's 32, word e % 4 of counter e / 4: p's overlap with both of the others', its upper
// eight with the lower ones of v, so that no two of the three are rounded alike.
template <class U>
MC_BOTH U bits_of_m(U word) { return word & 0xFFFFu; }
template <class U>
MC_BOTH U bits_of_p(U word) { return (word >> 8) & 0xFFFFu; }
template <class U>
MC_BOTH U bits_of_v(U word) { return word >> 16; }

// What to do with a gradient whose squares add up to `totals`: clip[0] is its norm, times `scale` where there is one, and clip[1] the
// factor that unscales and clips it (max_norm 0: never), or NaN where anything is not finite: then the step is left out.
MC_BOTH void verdict(float* clip, const double* totals, int64_t n, const float* scale, float max_norm) {
    double total = 0;
    for (int64_t i = 0; i < n; i++) total += totals[i];
    const float unscale = scale ? *scale : 1.0f, norm = static_cast<float>(sqrt(total)) * fabsf(unscale);
    float factor = unscale;
    const float most = max_norm / (norm + 1e-6f);  // torch.nn.utils.clip_grad_norm_'s
    if (max_norm > 0 && most < 1) factor *= most;
    clip[0] = norm;
    clip[1] = norm - norm == 0 && factor - factor == 0 ? factor : NAN;
}

// The update of one element, or of a vector of them. `g` is as it was stored; `factor` unscales and clips it; `exact` has roots and
// ratios, to the last bit.
template <class F, class Exact>
MC_BOTH void update(F& p, F& m, F& v, F g, float factor, const Numbers& c, const Item& item, const Exact& exact) {
    g = g * factor;
    p = p * c.keep;
    m = m + (g - m) * c.rise1;
    v = v * c.keep2 + (g * g) * c.rise2;
    p = p - exact.ratio(m * item.size, exact.root(v) * item.root + c.eps);
}

}  // namespace
