// Attention on the CPU, forward and backward: softmax(q k^T scale + mask) v in tiles that stay in cache (Dao, 2023, "FlashAttention-2").
//
// Sequences are runs of rows of q (s h d) and of k, v (t kv d), d innermost, and a task is one sequence and one head of k and v with
// all the heads of q that share it; so nothing is summed across tasks and results do not depend on the number of threads. A task
// copies its keys and values once as products want them (product.h): then every product is one register-blocked loop, whatever the
// dtype, the strides and the head dim. Of the probabilities each row's largest score and its sum are kept, and the backward computes
// them again as they were: one logarithm for both, once rounded, would be off by as much for the whole row.
//
// Nothing but results is rounded to 16 bits. Of what is given in bf16 scores and the gradients of probabilities are products of pairs,
// where a processor has units for them: their factors are exact. With tiles all others are too, of probabilities and gradients of
// scores in two parts: to 17 digits, where results have 8.
//
// Element (row, key) of the dropout mask has the number row * span + key, where rows count through (b h s), keys within a sequence,
// and span is the longest sequence's keys rounded up to 128.
#include "product.h"
#include "random.h"

namespace {

// ---- tiles: ROWS queries against up to KEYS keys; keys turned (d x keys) lie in panels of PANEL

template <Units U>
constexpr int ROWS = U == TILES ? 64 : 48;
constexpr int KEYS = 512;
constexpr int64_t LINE = KEYS + LANES;  // floats from a row of scores to the next; what lies past a row's keys is zero

// e^x where x is not above 0 by more than rounding: to 1 unit in the last place, and 0 below -87, where results would be subnormal: a
// product of such takes a hundred times as long
MC_INLINE vf below(vf x) {
    const Exponent e(x);
    const vf p = e.p * (e.r * e.r) + (e.r + 1.0f);
#if defined(__AVX512F__)
    const __mmask16 there = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return reinterpret_cast<vf>(_mm512_maskz_scalef_ps(there, reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(e.n)));
#else
    const vf scaled = p * bits_to_float((float_to_bits(e.shifted) - (0x4B400000u - 127u)) << 23);
    return choose<pf>(x, vf{}, scaled, [](pf x) { return x < -87.0f; });
#endif
}

struct Problem {
    const void *q, *k, *v, *grad, *mask;
    void *to, *dq, *dk, *dv;  // to: the forward's out
    float *top, *share, *dmask;  // of each row the largest score, and 1 over the sum of e^(score - that)
    Dtype mask_dtype;
    int64_t b, s, t, heads, kv, d, wide, sequences, span;
    int64_t mask_b, mask_h, mask_s, mask_t;
    Array lengths_q, lengths_k;
    float scale, before, after;  // of scores: of their queries, and of what is multiplied
    bool causal, drop;
    uint64_t seed;
    Rate rate{0.0};

    void keep(const Array& stats) { top = stats.as<float>(), share = top + b * heads * s; }
    int64_t length(const Array& lengths, int64_t i) const {
        return lengths.dtype == mc::I64 ? lengths.as<int64_t>()[i] : lengths.as<int32_t>()[i];
    }
    int64_t group() const { return heads / kv; }
    bool packed() const { return lengths_q.given; }
};

// One sequence and one head of the queries: where its rows are and what they see.
struct Head {
    const Problem& p;
    int64_t batch, head, q0, k0, s, t;
    Head(const Problem& p, int64_t sequence, int64_t head) : p(p), batch(p.packed() ? 0 : sequence), head(head) {
        q0 = p.packed() ? p.length(p.lengths_q, sequence) : sequence * p.s;
        k0 = p.packed() ? p.length(p.lengths_k, sequence) : sequence * p.t;
        s = p.packed() ? p.length(p.lengths_q, sequence + 1) - q0 : p.s;
        t = p.packed() ? p.length(p.lengths_k, sequence + 1) - k0 : p.t;
    }
    int64_t row(int64_t i) const { return (batch * p.heads + head) * p.s + (p.packed() ? q0 : 0) + i; }  // of b h s
    int64_t queries(int64_t i) const { return ((q0 + i) * p.heads + head) * p.d; }                        // in q and out
    int64_t keys(int64_t kv) const { return (k0 * p.kv + kv) * p.d; }                                     // in k and v
    int64_t sees(int64_t i) const { return p.causal ? most(0, least(t, i + 1 + t - s)) : t; }            // keys of row i, without a mask
    int64_t hidden(int64_t i) const {                                                                    // the offset of row i of the mask
        const int64_t b = p.mask_b == 1 ? 0 : batch, h = p.mask_h == 1 ? 0 : head;
        return ((b * p.mask_h + h) * p.mask_s + (p.mask_s == 1 ? 0 : i)) * p.mask_t;
    }
    MC_INLINE vf bias(int64_t at, int n) const {  // 16 of the mask: 0 or -inf, or what is to be added
        switch (p.mask_dtype) {
            case mc::F32: return load_n(static_cast<const float*>(p.mask) + at, n);
            case mc::BF16: return load_n(static_cast<const bf16*>(p.mask) + at, n);
            case mc::F16: return load_n(static_cast<const fp16*>(p.mask) + at, n);
            default:
                return choose<pf>(load_n(static_cast<const uint8_t*>(p.mask) + at, n), vf{}, all(-INFINITY),
                                  [](pf x) { return x != 0.0f; });
        }
    }
    bool any(int64_t i, int64_t rows, int64_t key, int n) const {  // does the mask show any of these keys to any of these rows?
        for (int64_t at = 0; at < (p.mask_s == 1 ? 1 : rows); at++) {
            const vf given = only(bias(hidden(i + at) + key, n), n, -INFINITY);  // a NaN must show
            if (sum(choose<pf>(given, vf{}, all(1.0f), [](pf x) { return x == -INFINITY; })) != 0) return true;
        }
        return false;
    }
    // The keys that rows [i, i + rows) see lie in [begin, end), begin at the edge of a panel and of a block of random bits.
    void seen(int64_t i, int64_t rows, int64_t& begin, int64_t& end) const {
        begin = 0, end = sees(i + rows - 1);
        if (!p.mask) return;
        while (end > 0) {
            const int64_t at = (end - 1) / LANES * LANES;
            if (any(i, rows, at, static_cast<int>(end - at))) break;
            end = at;
        }
        int64_t at = 0;
        while (at < end && !any(i, rows, at, static_cast<int>(least(LANES, end - at)))) at += LANES;
        begin = at / BLOCK * BLOCK;
    }
    // Scores of row i and keys [from, from + n): the mask is added; returns the largest.
    float hide(float* x, int64_t i, int64_t from, int64_t n) const {
        vf top = all(-INFINITY);
        const int64_t offset = p.mask ? hidden(i) + from : 0;
        each(n, [&](int64_t j, int lanes) MC_INLINED {
            vf score = load(x + j);
            if (p.mask) score += bias(offset + j, lanes);
            if (lanes < LANES) score = only(score, lanes, -INFINITY);
            if (p.mask || lanes < LANES) store(x + j, score);
            top = vmax(top, score);
        });
        return largest(top);
    }
    void bits(uint16_t* random, int64_t i, int64_t from, int64_t n) const {
        const uint64_t at = (static_cast<uint64_t>(row(i)) * p.span + from) / BLOCK;
        for (int64_t j = 0; j < n; j += BLOCK) draw(random + j, at + j / BLOCK, p.seed);
    }
};

MC_INLINE void clear(float* x, int64_t from, int64_t to) {  // from a multiple of 16
    for (; from < to; from += LANES) store(x + from, vf{});
}

// ---- the products, and their factors

// What is on the left and what is turned for scores.
template <Units U, class T>
void left(float* to, const T* from, int64_t rows, int64_t step, int64_t d, int64_t wide, float scale) {
    if constexpr (U == SINGLE) gather(to, from, rows, step, d, wide, scale);
    else gather_pairs(to, from, rows, step, d, wide, scale);
}
template <Units U, class T>
void turned(float* to, const T* from, int64_t rows, int64_t step, int64_t d, int64_t wide) {
    if constexpr (U == SINGLE) turn(to, from, rows, step, d, d);
    else turn(to, reinterpret_cast<const two*>(from), rows, step / 2, d / 2, U == TILES ? wide / 2 : d / 2);
}
// Scores of `rows` queries and the keys [from, from + n) of the panels; in fp32 the queries have their scale.
template <Units U>
void scores(float* x, const float* q, int64_t rows, int64_t wide, const float* panels, int64_t d, int64_t from, int64_t n, float scale) {
    for (int64_t at = 0; at < n; at += PANEL, x += PANEL) {
        const int64_t keys = least(PANEL, up(n - at, LANES));
        if constexpr (U == SINGLE) product<false>(rows, keys, d, q, wide, panels + (from + at) * d, PANEL, x, LINE, false);
        if constexpr (U == PAIRS)
            tiles(rows, keys, [&](int64_t i, int64_t j, auto N) {
                const float* panel = panels + (from + at) * (d / 2);
                tile_of_pairs<N.value>(d / 2, q + i * (wide / 2), wide / 2, panel + j, PANEL, x + i * LINE + j, LINE, scale);
            });
        if constexpr (U == TILES) {
            const Factor a{q, wide / 2, 16, 0}, b{panels + (from + at) * (wide / 2), PANEL, 16 * PANEL, 0};
            product_of_tiles<false, false>(up(rows, 32), up(keys, 32), wide, a, b, x, LINE, false);
            if (scale != 1)
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t j = 0; j < keys; j += LANES) store(x + r * LINE + j, load(x + r * LINE + j) * scale);
        }
    }
}

// c += x b of the keys [from, from + keys), with rows of x as_left and b as right
template <Units U>
void as_left(float* x, int64_t rows, int64_t keys) {
    if constexpr (U == TILES) split_rows(x, rows, LINE, keys);
}
template <Units U, class T>
void right(float* to, const T* from, int64_t rows, int64_t step, int64_t d, int64_t wide) {
    if constexpr (U == TILES) pair_rows(to, from, rows, step, d, wide);
    else gather(to, from, rows, step, d, wide, 1.0f);
}
template <Units U>
void weigh(float* x, int64_t rows, int64_t from, int64_t keys, const float* b, int64_t wide, float* c) {
    if constexpr (U == TILES) {
        const Factor left{x, LINE, 32, 16}, right{b + from / 2 * wide, wide, 16 * wide, 0};
        product_of_tiles<true, false>(up(rows, 32), wide, up(keys, 32), left, right, c, wide, true);
    } else {
        product<false>(rows, wide, keys, x, LINE, b + from * wide, wide, c, wide, true);
    }
}

// c += x^T b, with b as right_of_turned; of tiles the transpose of c is what grows, its rows line_of(t) apart. x is lost if it is `spare`.
template <Units U, class T>
void right_of_turned(float* to, const T* from, int64_t rows, int64_t step, int64_t d, int64_t wide) {
    if constexpr (U == TILES) turn(to, from, rows, step, d, wide), split_rows(to, wide, PANEL, PANEL);
    else gather(to, from, rows, step, d, wide, 1.0f);
}
constexpr int64_t line_of(int64_t t) { return up(t, PANEL) + LANES; }
template <Units U>
void weigh_turned(float* x, float* spare, int64_t rows, int64_t from, int64_t keys, const float* b, int64_t wide, float* c, int64_t t) {
    if constexpr (U == TILES) {
        split_columns(spare, x, rows, LINE, up(keys, 32));
        const Factor left{b, PANEL, 32, 0}, right{spare, LINE, 32 * LINE, 16 * LINE};
        product_of_tiles<false, true>(wide, up(keys, 32), up(rows, 32), left, right, c + from, line_of(t), true);
    } else {
        product<true>(keys, wide, rows, x, LINE, b, wide, c + from * wide, wide, true);
    }
}
// c, when it is done, times scale; `spare` has room for PANEL times t
template <Units U, class T>
void leave(T* to, const float* c, int64_t t, int64_t step, int64_t d, int64_t wide, float scale, float* spare) {
    if constexpr (U != TILES) return scatter(to, c, t, step, d, wide, scale);
    for (int64_t at = 0; at < d; at += PANEL) {
        const int64_t some = least(PANEL, d - at);
        turn(spare, c + at * line_of(t), some, line_of(t), t, t);
        scatter(to + at, spare, t, step, some, PANEL, scale);
    }
}

struct Scratch {  // floats at multiples of 64 bytes, taken one after the other out of one block
    char *block, *at;
    explicit Scratch(int64_t floats) : block(static_cast<char*>(malloc(floats * 4 + 64 * 32))), at(block) {}
    ~Scratch() { free(block); }
    float* take(int64_t floats) {
        at += -reinterpret_cast<uintptr_t>(at) & 63;
        float* taken = reinterpret_cast<float*>(at);
        at += floats * 4;
        return taken;
    }
};

// Run f(task, scratch) for every task, each thread taking the next one that is left. False: no memory.
template <class F>
bool tasks(int64_t n, int64_t floats, F f) {
    int64_t next = 0, failed = 0;
    mc::parallel(least(n, mc::threads()), 1, [&](int64_t, int64_t) {
        Scratch scratch(floats);
        if (!scratch.block) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        if (scratch.block)
            for (int64_t task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < n;) {
                scratch.at = scratch.block;
                f(task, scratch);
            }
    });
    return !failed;
}

// ---- forward

// Rows [i, i + rows) of one head.
template <Units U, class T>
void attend(const Head& h, int64_t i, int64_t rows, const float* panels, const float* values, float* q, float* x, float* sums) {
    const Problem& p = h.p;
    const int64_t wide = p.wide;
    float top[ROWS<U>], total[ROWS<U>];
    int64_t begin, end;
    h.seen(i, rows, begin, end);
    for (int64_t r = 0; r < rows; r++) top[r] = -INFINITY, total[r] = 0;
    left<U>(q, static_cast<const T*>(p.q) + h.queries(i), rows, p.heads * p.d, p.d, wide, p.before);
    clear(sums, 0, ROWS<U> * wide);
    for (int64_t from = begin; from < end; from += KEYS) {
        const int64_t keys = least(KEYS, end - from);
        scores<U>(x, q, rows, wide, panels, p.d, from, keys, p.after);
        for (int64_t r = 0; r < rows; r++) {
            float* row = x + r * LINE;
            const int64_t n = most(0, least(keys, h.sees(i + r) - from));
            const float high = h.hide(row, i + r, from, n), now = high > top[r] || high != high ? high : top[r];
            if (now == -INFINITY) {
                clear(row, 0, up(keys, 32));
                continue;
            }
            if (now != top[r] && total[r] != 0) {
                const float less = std::exp(top[r] - now);
                total[r] *= less;
                for (int64_t c = 0; c < wide; c += LANES) store(sums + r * wide + c, load(sums + r * wide + c) * less);
            }
            top[r] = now;
            vf all_of = vf{};
            for (int64_t j = 0; j < n; j += LANES) {
                const vf e = below(load(row + j) - now);
                all_of += e;
                store(row + j, e);
            }
            total[r] += sum(all_of);
            if (p.drop) {
                uint16_t random[KEYS];
                h.bits(random, i + r, from, n);
                for (int64_t j = 0; j < n; j += LANES) store(row + j, masked(load(row + j), random + j, p.rate.threshold));
            }
            clear(row, up(n, LANES), up(keys, 32));
            as_left<U>(row, 1, keys);
        }
        weigh<U>(x, rows, from, keys, values, wide, sums);
    }
    for (int64_t r = 0; r < rows; r++) {
        const bool blind = total[r] == 0;  // it sees nothing; e^(x - inf) is 0
        const float share = blind ? 0 : 1 / total[r];
        scatter(static_cast<T*>(p.to) + h.queries(i + r), sums + r * wide, 1, 0, p.d, wide, p.drop ? share * p.rate.scale : share);
        p.top[h.row(i + r)] = blind ? INFINITY : top[r], p.share[h.row(i + r)] = share;
    }
}

template <Units U, class T>
bool forward(const Problem& p, int64_t longest_q, int64_t longest_k) {
    // the queries of a task in parts where there are fewer tasks than would keep all threads busy; a part copies the keys again
    const int64_t blocks = (longest_q + ROWS<U> - 1) / ROWS<U>, whole = p.sequences * p.kv;
    const int64_t parts = most(1, least(blocks, mc::threads() == 1 ? 1 : (4 * mc::threads() + whole - 1) / whole));
    const int64_t each_part = (blocks + parts - 1) / parts * ROWS<U>;
    const int64_t floats = up(longest_k, PANEL) * 2 * p.wide + ROWS<U> * (2 * p.wide + LINE);
    return tasks(whole * parts, floats, [&](int64_t task, Scratch& scratch) {
        const int64_t part = task % parts, kv = task / parts % p.kv, sequence = task / parts / p.kv;
        const Head one(p, sequence, kv * p.group());
        const int64_t begin = part * each_part, end = least(one.s, begin + each_part);
        if (begin >= end) return;
        [[maybe_unused]] const Shaped<U> shape;
        float* panels = scratch.take(up(one.t, PANEL) * p.wide);
        float* values = scratch.take(up(one.t, 32) * p.wide);
        float* q = scratch.take(ROWS<U> * p.wide);
        float* sums = scratch.take(ROWS<U> * p.wide);
        float* x = scratch.take(ROWS<U> * LINE);
        clear(q, 0, ROWS<U> * p.wide);  // rows past the last are computed and not read; what they hold must be no subnormals
        turned<U>(panels, static_cast<const T*>(p.k) + one.keys(kv), one.t, p.kv * p.d, p.d, p.wide);
        right<U>(values, static_cast<const T*>(p.v) + one.keys(kv), one.t, p.kv * p.d, p.d, p.wide);
        for (int64_t g = 0; g < p.group(); g++) {
            const Head head(p, sequence, kv * p.group() + g);
            for (int64_t i = begin; i < end; i += ROWS<U>) attend<U, T>(head, i, least(ROWS<U>, end - i), panels, values, q, x, sums);
        }
    });
}

// ---- backward: with P the probabilities, M the dropout mask over 1 - p, dP = M * (dO V^T) and D = sum(P * dP) of each row,
// dS = P * (dP - D), dV = (M * P)^T dO, dQ = dS K scale, dK = dS^T Q scale, dmask = dS. D is also sum(dO * O), which takes no keys before
// the first dS, but O was rounded.

// What a task has of its keys, and the tiles of ROWS queries and all that they see.
template <Units U>
struct Backward {
    float *k_panels, *v_panels, *k, *dk, *dv;
    float *q, *grad, *right_q, *right_grad, *dq, *x, *dx, *spare;
    static int64_t all_tiles(int64_t t) { return (t + KEYS - 1) / KEYS * ROWS<U> * LINE; }
    static int64_t sums(int64_t t, int64_t wide) { return U == TILES ? line_of(t) * wide : (t + 2 * LANES) * wide; }
    static int64_t floats(int64_t t, int64_t wide) {
        const int64_t keys = (2 * up(t, PANEL) + up(t, 32)) * wide + 2 * sums(t, wide);
        return keys + (3 * ROWS<U> + 2 * PANEL) * wide + 2 * all_tiles(t) + ROWS<U> * LINE;
    }
    Backward(Scratch& scratch, int64_t t, int64_t wide) {
        k_panels = scratch.take(up(t, PANEL) * wide), v_panels = scratch.take(up(t, PANEL) * wide);
        k = scratch.take(up(t, 32) * wide), dk = scratch.take(sums(t, wide)), dv = scratch.take(sums(t, wide));
        for (float** each : {&q, &grad, &dq}) *each = scratch.take(ROWS<U> * wide);
        for (float** each : {&right_q, &right_grad}) *each = scratch.take(PANEL * wide);
        if (U == SINGLE) right_q = q, right_grad = grad;
        x = scratch.take(all_tiles(t)), dx = scratch.take(all_tiles(t)), spare = scratch.take(ROWS<U> * LINE);
        for (float* each : {q, grad}) clear(each, 0, ROWS<U> * wide);
        clear(dk, 0, sums(t, wide));
        clear(dv, 0, sums(t, wide));
    }
};

// x = P of rows [i, i + rows) and keys [from, from + keys), where dropped negated; dx = dO V^T; and what they add to each row's D
template <Units U>
void probabilities(const Head& h, int64_t i, int64_t rows, int64_t from, int64_t keys, const Backward<U>& b, float* x, float* dx, float* inner) {
    const Problem& p = h.p;
    scores<U>(x, b.q, rows, p.wide, b.k_panels, p.d, from, keys, p.after);
    scores<U>(dx, b.grad, rows, p.wide, b.v_panels, p.d, from, keys, 1);
    for (int64_t r = 0; r < rows; r++) {
        float *row = x + r * LINE, *drow = dx + r * LINE;
        const int64_t n = most(0, least(keys, h.sees(i + r) - from)), clean = least(up(keys, LANES) + LANES, LINE);
        const float top = p.top[h.row(i + r)], share = p.share[h.row(i + r)];
        const int64_t hidden = p.mask ? h.hidden(i + r) + from : 0;
        const bool drop = p.drop;
        uint16_t random[KEYS];
        if (drop) h.bits(random, i + r, from, n);
        vf total{};
        each(n, [&](int64_t j, int lanes) MC_INLINED {
            vf score = load(row + j), change = load(drow + j);
            if (p.mask) score += h.bias(hidden + j, lanes);
            if (lanes < LANES) score = only(score, lanes, -INFINITY), change = only(change, lanes, 0), store(drow + j, change);
            const vf e = below(score - top) * share, kept = drop ? masked(e, random + j, p.rate.threshold) : e;
            total += kept * change;
            store(row + j, drop ? kept - (e - kept) : e);
        });
        inner[r] += sum(total);
        clear(row, up(n, LANES), clean);
        clear(drow, up(n, LANES), clean);
    }
}

// Rows [i, i + rows) of one head.
template <Units U, class T>
void differentiate(const Head& h, int64_t i, int64_t rows, const Backward<U>& b) {
    const Problem& p = h.p;
    const int64_t d = p.d, wide = p.wide, step = p.heads * d, t = h.t;
    const T *q = static_cast<const T*>(p.q) + h.queries(i), *grad = static_cast<const T*>(p.grad) + h.queries(i);
    left<U>(b.q, q, rows, step, d, wide, p.before);
    left<U>(b.grad, grad, rows, step, d, wide, 1.0f);
    if constexpr (U != SINGLE) {
        right_of_turned<U>(b.right_q, q, rows, step, d, wide);
        right_of_turned<U>(b.right_grad, grad, rows, step, d, wide);
    }
    clear(b.dq, 0, ROWS<U> * wide);
    int64_t begin, end;
    h.seen(i, rows, begin, end);
    float inner[ROWS<U>] = {};
    const auto each_tile = [&](auto f) {
        int64_t at = 0;
        for (int64_t from = begin; from < end; from += KEYS, at += ROWS<U> * LINE) f(from, least(KEYS, end - from), b.x + at, b.dx + at);
    };
    each_tile([&](int64_t from, int64_t keys, float* x, float* dx) { probabilities<U>(h, i, rows, from, keys, b, x, dx, inner); });
    each_tile([&](int64_t from, int64_t keys, float* x, float* dx) {
        for (int64_t r = 0; r < rows; r++) {
            float *row = x + r * LINE, *drow = dx + r * LINE;
            const int64_t n = most(0, least(keys, h.sees(i + r) - from));
            const bool drop = p.drop;
            const float scale = p.rate.scale, mean = drop ? inner[r] * scale : inner[r];
            each(n, [&](int64_t j, int lanes) MC_INLINED {
                const vf e = load(row + j), change = load(drow + j), kept = drop ? vmax(vf{}, e) : e;  // a NaN is kept
                const vf found = drop ? kept * (change * scale) - vabs(e) * mean : e * (change - mean);
                store(row + j, kept);
                store(drow + j, lanes < LANES ? only(found, lanes, 0) : found);
            });
            if (p.dmask) {
                float* to = p.dmask + h.hidden(i + r) + from;
                each(n, [&](int64_t j, int lanes) MC_INLINED { store_n(to + j, load_n(to + j, lanes) + load(drow + j), lanes); });
            }
        }
        weigh_turned<U>(x, x, rows, from, keys, b.right_grad, wide, b.dv, t);
        weigh_turned<U>(dx, b.spare, rows, from, keys, b.right_q, wide, b.dk, t);
        as_left<U>(dx, rows, keys);
        weigh<U>(dx, rows, from, keys, b.k, wide, b.dq);
    });
    scatter(static_cast<T*>(p.dq) + h.queries(i), b.dq, rows, step, d, wide, p.scale);
}

template <Units U, class T>
void backward_of(const Problem& p, int64_t sequence, int64_t kv, Scratch& scratch) {
    const Head one(p, sequence, kv * p.group());
    const int64_t t = one.t, d = p.d, wide = p.wide, step = p.kv * d;
    scratch.at = scratch.block;
    [[maybe_unused]] const Shaped<U> shape;
    const Backward<U> b(scratch, t, wide);
    const T *k = static_cast<const T*>(p.k) + one.keys(kv), *v = static_cast<const T*>(p.v) + one.keys(kv);
    turned<U>(b.k_panels, k, t, step, d, wide);
    turned<U>(b.v_panels, v, t, step, d, wide);
    right<U>(b.k, k, t, step, d, wide);
    for (int64_t g = 0; g < p.group(); g++) {
        const Head h(p, sequence, kv * p.group() + g);
        for (int64_t i = 0; i < h.s; i += ROWS<U>) differentiate<U, T>(h, i, least(ROWS<U>, h.s - i), b);
    }
    leave<U>(static_cast<T*>(p.dk) + one.keys(kv), b.dk, t, step, d, wide, U == SINGLE ? 1.0f : p.scale, b.x);  // of fp32 q has it
    leave<U>(static_cast<T*>(p.dv) + one.keys(kv), b.dv, t, step, d, wide, p.drop ? p.rate.scale : 1.0f, b.x);
}

template <Units U, class T>
bool backward(const Problem& p, int64_t longest_k) {
    // what shares an element of the mask's gradient is one task, in a fixed order
    const int64_t sequences = p.dmask && p.mask_b == 1 ? 1 : p.sequences, kvs = p.dmask && p.mask_h == 1 ? 1 : p.kv;
    return tasks(sequences * kvs, Backward<U>::floats(longest_k, p.wide), [&](int64_t task, Scratch& scratch) {
        const int64_t a = task / kvs, b = task % kvs;
        for (int64_t sequence = a; sequence < p.sequences; sequence += sequences)
            for (int64_t kv = b; kv < p.kv; kv += kvs) backward_of<U, T>(p, sequence, kv, scratch);
    });
}

template <bool FORTH, Units U, class T>
bool compute_by(Problem& p, int64_t longest_q, int64_t longest_k) {
    const bool power = std::ldexp(1.0f, std::ilogb(p.scale)) == p.scale;  // of two: with it numbers in bf16 stay exact
    const bool exact = U == SINGLE || power;
    p.before = exact ? p.scale : 1, p.after = exact ? 1 : p.scale;
    if constexpr (FORTH) return forward<U, T>(p, longest_q, longest_k);
    else return backward<U, T>(p, longest_k);
}
template <bool FORTH, class T>
bool compute(Problem& p, int64_t longest_q, int64_t longest_k) {
    if constexpr (std::is_same_v<T, bf16>) {
        const Units best = p.d % 2 ? SINGLE : units();
        if constexpr (TILED)
            if (best == TILES) {
                p.wide = up(p.d, 32);
                return compute_by<FORTH, TILES, T>(p, longest_q, longest_k);
            }
        if constexpr (PAIRED)
            if (best == PAIRS) return compute_by<FORTH, PAIRS, T>(p, longest_q, longest_k);
    }
    return compute_by<FORTH, SINGLE, T>(p, longest_q, longest_k);
}

// The arguments that both directions have.
Problem read(Call& call, Array& q) {
    q = call.in("q", FLOATS);
    const Array k = call.in("k", q.dtype);
    if (q.shape.rank != 4 || k.shape.rank != 4) call.refuse("q and k have %d and %d dimensions; wanted 4", q.shape.rank, k.shape.rank);
    const Array v = call.in("v", q.dtype, k.shape);
    Problem p{};
    p.q = q.data, p.k = k.data, p.v = v.data;
    p.b = q.shape.at[0], p.s = q.shape.at[1], p.heads = q.shape.at[2], p.d = q.shape.at[3], p.wide = up(p.d, LANES);
    p.t = k.shape.at[1], p.kv = k.shape.at[2];
    if (k.shape.at[0] != p.b || k.shape.at[3] != p.d) call.refuse("q and k differ in their batch or head dim");
    if (p.kv ? p.heads % p.kv != 0 : p.heads != 0) call.refuse("%lld heads are no multiple of %lld", (long long)p.heads, (long long)p.kv);
    return p;
}

void read_rest(Call& call, Problem& p, const Array& mask, int64_t& longest_q, int64_t& longest_k) {
    p.sequences = p.b, longest_q = p.s, longest_k = p.t;
    if (p.packed()) {
        p.sequences = p.lengths_q.shape.count() - 1, longest_q = longest_k = 0;
        if (p.b != 1) call.refuse("packed sequences are one row; this is a batch of %lld", (long long)p.b);
        for (int which = 0; which < 2; which++) {
            const Array& lengths = which ? p.lengths_k : p.lengths_q;
            int64_t& longest = which ? longest_k : longest_q;
            if (lengths.shape.rank != 1 || p.sequences < 0 || lengths.shape.count() != p.sequences + 1)
                call.refuse("lengths_q and lengths_k: one more than there are sequences, in both");
            for (int64_t i = 0; i < p.sequences; i++) {
                const int64_t n = p.length(lengths, i + 1) - p.length(lengths, i);
                if (n < 0) call.refuse("cumulative lengths must not fall");
                longest = most(longest, n);
            }
            if (p.length(lengths, 0) != 0 || p.length(lengths, p.sequences) != (which ? p.t : p.s))
                call.refuse("cumulative lengths must go from 0 to %lld", (long long)(which ? p.t : p.s));
        }
    }
    p.span = up(longest_k, BLOCK);
    if (mask) {
        const Shape& shape = mask.shape;
        if (shape.rank != 4) call.refuse("the mask has %d dimensions; wanted 4", shape.rank);
        p.mask = mask.data, p.mask_dtype = mask.dtype;
        p.mask_b = shape.at[0], p.mask_h = shape.at[1], p.mask_s = shape.at[2], p.mask_t = shape.at[3];
        const bool rows = p.packed() ? p.mask_s >= longest_q && p.mask_t >= longest_k : p.mask_s == p.s && p.mask_t == p.t;
        if ((p.mask_b != 1 && p.mask_b != p.b) || (p.mask_h != 1 && p.mask_h != p.heads) ||
            !(rows || (p.mask_s == 1 && (p.packed() ? p.mask_t >= longest_k : p.mask_t == p.t))))
            call.refuse("the mask does not fit: wanted (1|b, 1|heads, 1|s, t)");
        if (!mask.shape.count()) p.mask = nullptr;
    }
}

Array read_mask(Call& call, Problem& p) {
    const Array mask = call.maybe("mask", FLOATS | BOOL);
    p.lengths_q = call.maybe("lengths_q", I32 | I64);
    p.lengths_k = call.maybe("lengths_k", I32 | I64);
    if (p.lengths_q.given != p.lengths_k.given) call.refuse("lengths_q and lengths_k go together");
    p.scale = static_cast<float>(call.real("scale"));
    p.causal = call.flag("causal");
    const Array seed = call.maybe("seed", I64, Shape{1});
    const double rate = call.real("p");
    if (seed) p.drop = true, p.seed = *seed.as<uint64_t>(), p.rate = Rate(rate);
    return mask;
}

}  // namespace

MC_KERNEL(attention) {
    Array q;
    int64_t longest_q, longest_k;
    Problem p = read(call, q);
    const Array mask = read_mask(call, p);
    p.to = call.out("out", q.dtype, q.shape).data;
    p.keep(call.out("stats", F32, Shape{2, p.b, p.heads, p.s}));
    read_rest(call, p, mask, longest_q, longest_k);
    call.ready();
    if (!q.shape.count()) return;
    bool done = false;
    MC_FOR_FLOAT(q.dtype, T, done = compute<true, T>(p, longest_q, longest_k))
    if (!done) call.refuse("no memory");
}

MC_KERNEL(attention_backward) {
    Array q;
    int64_t longest_q, longest_k;
    Problem p = read(call, q);
    const Array mask = read_mask(call, p);
    call.in("out", q.dtype, q.shape);  // of kernels that take D from it
    p.keep(call.in("stats", F32, Shape{2, p.b, p.heads, p.s}));
    p.grad = call.in("grad", q.dtype, q.shape).data;
    p.dq = call.out("dq", q.dtype, q.shape).data;
    p.dk = call.out("dk", q.dtype, Shape{p.b, p.t, p.kv, p.d}).data;
    p.dv = call.out("dv", q.dtype, Shape{p.b, p.t, p.kv, p.d}).data;
    p.dmask = call.maybe_out("dmask", F32, mask.shape).as<float>();
    read_rest(call, p, mask, longest_q, longest_k);
    call.ready();
    bool done = false;
    MC_FOR_FLOAT(q.dtype, T, done = compute<false, T>(p, longest_q, longest_k))
    if (!done) call.refuse("no memory");
}
