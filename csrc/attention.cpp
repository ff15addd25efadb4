// Attention on the CPU, forward and backward: softmax(q k^T scale + mask) v in tiles that stay in cache (Dao, 2023, "FlashAttention-2").
//
// Sequences are runs of rows of q (s h d) and of k, v (t kv d), d innermost, and a task is one sequence and one head of k and v with
// all the heads of q that share it; so nothing is summed across tasks and results do not depend on the number of threads. A task
// copies its keys and values once into fp32 tiles: then every product is one register-blocked loop, whatever the dtype, the strides
// and the head dim. Of the probabilities each row's largest score and its sum are kept, and the backward computes
// them again as they were: one logarithm for both, once rounded, would be off by as much for the whole row.
//
// Nothing but results is rounded to 16 bits. Where a processor multiplies pairs of bf16 and adds both to a sum in fp32, twice the
// products of an instruction, that is done for scores and for the gradients of probabilities, whose factors are given in bf16.
//
// Element (row, key) of the dropout mask has the number row * span + key, where rows count through (b h s), keys within a sequence,
// and span is the longest sequence's keys rounded up to 128.
#include <cstdlib>
#include <type_traits>

#include "random.h"

namespace {

// ---- products of tiles: c (m x n) = or += a (m x k) b (k x n), with registers of the processor's own width

#if defined(__AVX512F__)
constexpr int ACROSS = 4;
#else
constexpr int ACROSS = 2;
#endif
constexpr int DOWN = 6;  // DOWN x ACROSS sums, ACROSS of b and one of a: all but a few of the registers

// DOWN rows and N registers of c; a is DOWN x k, or, TURNED, k x DOWN
template <int N, bool TURNED>
void tile(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
    pf sums[DOWN][N];
    const float* rows[DOWN];
#pragma GCC unroll 8
    for (int i = 0; i < DOWN; i++) {
        rows[i] = a + i * lda;
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) sums[i][j] = pf{};
    }
    for (int64_t at = 0; at < k; at++, b += ldb, a += lda) {
        pf right[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) right[j] = *reinterpret_cast<const pf_any*>(b + j * PART);
#pragma GCC unroll 8
        for (int i = 0; i < DOWN; i++) {
            const pf left = (TURNED ? a[i] : rows[i][at]) - pf{};
#pragma GCC unroll 4
            for (int j = 0; j < N; j++) sums[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < DOWN; i++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) {
            pf_any& to = *reinterpret_cast<pf_any*>(c + i * ldc + j * PART);
            to = add ? to + sums[i][j] : sums[i][j];
        }
}

#if defined(__AVX512F__) && (defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 11)
#define MC_PAIRS __attribute__((target("avx512bf16")))
constexpr bool PAIRABLE = true;
bool pairs_here() {  // Intel's take two cycles where a multiplication in fp32 takes one
    return __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel");
}

// The same of pairs, k of them: c = sums * times
template <int N>
MC_PAIRS void tile_of_pairs(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, float times) {
    __m512 sums[DOWN][N];
#pragma GCC unroll 8
    for (int i = 0; i < DOWN; i++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) sums[i][j] = _mm512_setzero_ps();
    for (int64_t at = 0; at < k; at++, b += ldb) {
        __m512bh right[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) right[j] = (__m512bh)_mm512_loadu_ps(b + j * PART);
#pragma GCC unroll 8
        for (int i = 0; i < DOWN; i++) {
            const __m512bh left = (__m512bh)_mm512_set1_ps(a[i * lda + at]);
#pragma GCC unroll 4
            for (int j = 0; j < N; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], left, right[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < DOWN; i++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) _mm512_storeu_ps(c + i * ldc + j * PART, _mm512_mul_ps(sums[i][j], _mm512_set1_ps(times)));
}
#else
constexpr bool PAIRABLE = false;  // neither of these is called
inline bool pairs_here() { return false; }
template <int N>
void tile_of_pairs(int64_t, const float*, int64_t, const float*, int64_t, float*, int64_t, float) {}
#endif

// f(rows of c, i; floats of b and c, j; N), N a constant, for every tile
template <class F>
MC_INLINE void tiles(int64_t m, int64_t n, F f) {
    for (int64_t j = 0; j < n; j += ACROSS * PART)
        for (int64_t i = 0; i < m; i += DOWN) switch ((n - j) / PART) {
                case 1: f(i, j, std::integral_constant<int, 1>()); break;
                case 2: f(i, j, std::integral_constant<int, 2>()); break;
                case 3: f(i, j, std::integral_constant<int, ACROSS == 4 ? 3 : 2>()); break;
                default: f(i, j, std::integral_constant<int, ACROSS>());
            }
}

// n is a multiple of 16; of a and c there are as many rows as make m a multiple of DOWN. Sums of many are sums of sums of SUM: a number
// that is added to a large one loses what it has below that one's last digit. What is not added to anything is scores, whose error is
// most of all that follows.
template <bool TURNED>
void product(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
    const int64_t SUM = TURNED || add ? 64 : 32;
    for (; k > 0; k -= SUM, a += TURNED ? SUM * lda : SUM, b += SUM * ldb, add = true) {
        const int64_t some = k < SUM ? k : SUM;
        tiles(m, n, [&](int64_t i, int64_t j, auto N) {
            tile<N.value, TURNED>(some, TURNED ? a + i : a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, add);
        });
    }
}

// ---- tiles: ROWS queries against up to KEYS keys; keys turned (d x keys) lie in panels of PANEL

constexpr int ROWS = 48, KEYS = 512, PANEL = 64;
constexpr int64_t LINE = KEYS + LANES;  // floats from a row of scores to the next; what lies past a row's keys is zero

MC_INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
MC_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
MC_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// rows of d at a distance, times scale, to rows of `wide` (d rounded up to 16, the rest zero)
template <class T>
void gather(float* to, const T* from, int64_t rows, int64_t step, int64_t d, int64_t wide, float scale) {
    for (int64_t i = 0; i < rows; i++)
        each(d, [&](int64_t c, int n) MC_INLINED { store(to + i * wide + c, load_n(from + i * step + c, n) * scale); });
}

template <class T>
void scatter(T* to, const float* from, int64_t rows, int64_t step, int64_t d, int64_t wide, float scale) {
    for (int64_t i = 0; i < rows; i++)
        each(d, [&](int64_t c, int n) MC_INLINED { store_n(to + i * step + c, load(from + i * wide + c) * scale, n); });
}

// The same as they are, in pairs of neighbours: rows of wide / 2.
MC_INLINE void gather_pairs(float* to, const bf16* from, int64_t rows, int64_t step, int64_t d, int64_t wide) {
    for (int64_t i = 0; i < rows; i++) {
        memset(to + i * (wide / 2), 0, wide * 2);
        memcpy(to + i * (wide / 2), from + i * step, d * 2);
    }
}

// two bf16, a float to what only moves it
struct two {
    uint16_t half[2];
};
MC_INLINE vf load(const two* p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

// Blocks of HALF elements of 16 rows exchanged across the diagonal
template <int HALF>
MC_INLINE void exchange(vf* x) {
#pragma GCC unroll 16
    for (int row = 0; row < LANES; row++)
        if (!(row & HALF)) {
            const vf a = x[row], b = x[row | HALF];
            if constexpr (HALF < PART) {
                const auto upper = [](int l) { return l & HALF ? PART + (l ^ HALF) : l; };
                const auto lower = [](int l) { return l & HALF ? PART + l : l ^ HALF; };
                x[row] = of_parts<vf>(MC_PART { return picked(part<pf>(a, i), part<pf>(b, i), upper); });
                x[row | HALF] = of_parts<vf>(MC_PART { return picked(part<pf>(a, i), part<pf>(b, i), lower); });
            } else {
                x[row] = of_parts<vf>(MC_PART { return i * PART & HALF ? part<pf>(b, i ^ HALF / PART) : part<pf>(a, i); });
                x[row | HALF] = of_parts<vf>(MC_PART { return i * PART & HALF ? part<pf>(b, i) : part<pf>(a, i ^ HALF / PART); });
            }
        }
}

// rows of d at a distance to panels of d x PANEL, the rows past the last zero
template <class T>
void turn(float* to, const T* from, int64_t rows, int64_t step, int64_t d) {
    for (int64_t j = 0; j < up(rows, PANEL); j += LANES) {
        float* panel = to + j / PANEL * PANEL * d + j % PANEL;
        each(d, [&](int64_t c, int n) MC_INLINED {
            vf x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) x[i] = j + i < rows ? load_n(from + (j + i) * step + c, n) : vf{};
            exchange<8>(x), exchange<4>(x), exchange<2>(x), exchange<1>(x);
            for (int i = 0; i < n; i++) store(panel + (c + i) * PANEL, x[i]);
        });
    }
}

// What scores are products of: queries, and keys in panels
template <bool PAIRS, class T>
void left(float* to, const T* from, int64_t rows, int64_t step, int64_t d, int64_t wide, float scale) {
    if constexpr (PAIRS) gather_pairs(to, from, rows, step, d, wide);
    else gather(to, from, rows, step, d, wide, scale);
}
template <bool PAIRS, class T>
void turned(float* to, const T* from, int64_t rows, int64_t step, int64_t d) {
    if constexpr (PAIRS) turn(to, reinterpret_cast<const two*>(from), rows, step / 2, d / 2);
    else turn(to, from, rows, step, d);
}

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
    float scale;
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

// Scores of `rows` queries and the keys [from, from + n) of the panels; only those of pairs are multiplied by `times`.
template <bool PAIRS>
void scores(float* x, const float* q, int64_t rows, int64_t wide, const float* panels, int64_t d, int64_t from, int64_t n, float times) {
    for (int64_t at = 0; at < n; at += PANEL) {
        const int64_t keys = least(PANEL, up(n - at, LANES));
        if constexpr (PAIRS) {
            const float* panel = panels + (from + at) * (d / 2);
            tiles(rows, keys, [&](int64_t i, int64_t j, auto N) {
                tile_of_pairs<N.value>(d / 2, q + i * (wide / 2), wide / 2, panel + j, PANEL, x + i * LINE + at + j, LINE, times);
            });
        } else {
            product<false>(rows, keys, d, q, wide, panels + (from + at) * d, PANEL, x + at, LINE, false);
        }
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
template <bool PAIRS, class T>
void attend(const Head& h, int64_t i, int64_t rows, const float* panels, const float* values, float* q, float* x, float* sums) {
    const Problem& p = h.p;
    const int64_t wide = p.wide;
    float top[ROWS], total[ROWS];
    int64_t begin, end;
    h.seen(i, rows, begin, end);
    for (int64_t r = 0; r < rows; r++) top[r] = -INFINITY, total[r] = 0;
    left<PAIRS>(q, static_cast<const T*>(p.q) + h.queries(i), rows, p.heads * p.d, p.d, wide, p.scale);
    clear(sums, 0, ROWS * wide);
    for (int64_t from = begin; from < end; from += KEYS) {
        const int64_t keys = least(KEYS, end - from);
        scores<PAIRS>(x, q, rows, wide, panels, p.d, from, keys, p.scale);
        for (int64_t r = 0; r < rows; r++) {
            float* row = x + r * LINE;
            const int64_t n = most(0, least(keys, h.sees(i + r) - from));
            const float high = h.hide(row, i + r, from, n), now = high > top[r] || high != high ? high : top[r];
            if (now == -INFINITY) {
                clear(row, 0, keys);
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
            clear(row, up(n, LANES), keys);
        }
        product<false>(rows, wide, keys, x, LINE, values + from * wide, wide, sums, wide, true);
    }
    for (int64_t r = 0; r < rows; r++) {
        const bool blind = total[r] == 0;  // it sees nothing; e^(x - inf) is 0
        const float share = blind ? 0 : 1 / total[r];
        scatter(static_cast<T*>(p.to) + h.queries(i + r), sums + r * wide, 1, 0, p.d, wide, p.drop ? share * p.rate.scale : share);
        p.top[h.row(i + r)] = blind ? INFINITY : top[r], p.share[h.row(i + r)] = share;
    }
}

template <bool PAIRS, class T>
bool forward(const Problem& p, int64_t longest_q, int64_t longest_k) {
    // the queries of a task in parts where there are fewer tasks than would keep all threads busy; a part copies the keys again
    const int64_t blocks = (longest_q + ROWS - 1) / ROWS, whole = p.sequences * p.kv;
    const int64_t parts = most(1, least(blocks, mc::threads() == 1 ? 1 : (4 * mc::threads() + whole - 1) / whole));
    const int64_t each_part = (blocks + parts - 1) / parts * ROWS;
    const int64_t floats = up(longest_k, PANEL) * (p.d + p.wide) + ROWS * (2 * p.wide + LINE);
    return tasks(whole * parts, floats, [&](int64_t task, Scratch& scratch) {
        const int64_t part = task % parts, kv = task / parts % p.kv, sequence = task / parts / p.kv;
        const Head one(p, sequence, kv * p.group());
        const int64_t begin = part * each_part, end = least(one.s, begin + each_part);
        if (begin >= end) return;
        float* panels = scratch.take(up(one.t, PANEL) * p.d);
        float* values = scratch.take(one.t * p.wide);
        float* q = scratch.take(ROWS * p.wide);
        float* sums = scratch.take(ROWS * p.wide);
        float* x = scratch.take(ROWS * LINE);
        clear(q, 0, ROWS * p.wide);  // rows past the last are computed and not read; what they hold must be no subnormals
        turned<PAIRS>(panels, static_cast<const T*>(p.k) + one.keys(kv), one.t, p.kv * p.d, p.d);
        gather(values, static_cast<const T*>(p.v) + one.keys(kv), one.t, p.kv * p.d, p.d, p.wide, 1.0f);
        for (int64_t g = 0; g < p.group(); g++) {
            const Head head(p, sequence, kv * p.group() + g);
            for (int64_t i = begin; i < end; i += ROWS) attend<PAIRS, T>(head, i, least(ROWS, end - i), panels, values, q, x, sums);
        }
    });
}

// ---- backward: with P the probabilities, M the dropout mask over 1 - p, dP = M * (dO V^T) and D = sum(P * dP) of each row,
// dS = P * (dP - D), dV = (M * P)^T dO, dQ = dS K scale, dK = dS^T Q scale, dmask = dS. D is also sum(dO * O), which takes no keys before
// the first dS, but O was rounded.

// What a task has of its keys, and the tiles of ROWS queries and all that they see.
struct Backward {
    float *k_panels, *v_panels, *k, *dk, *dv;
    float *q, *grad, *pairs_q, *pairs_grad, *dq, *x, *dx;
    static int64_t all_tiles(int64_t t) { return (t + KEYS - 1) / KEYS * ROWS * LINE; }
    static int64_t floats(int64_t t, int64_t d, int64_t wide) {
        return up(t, PANEL) * 2 * d + (3 * t + 4 * LANES) * wide + 5 * ROWS * wide + 2 * all_tiles(t);
    }
    Backward(Scratch& scratch, int64_t t, int64_t d, int64_t wide) {
        k_panels = scratch.take(up(t, PANEL) * d), v_panels = scratch.take(up(t, PANEL) * d);
        k = scratch.take(t * wide), dk = scratch.take((t + 2 * LANES) * wide), dv = scratch.take((t + 2 * LANES) * wide);
        for (float** each : {&q, &grad, &pairs_q, &pairs_grad, &dq}) *each = scratch.take(ROWS * wide);
        x = scratch.take(all_tiles(t)), dx = scratch.take(all_tiles(t));
        for (float* each : {q, grad, pairs_q, pairs_grad}) clear(each, 0, ROWS * wide);
    }
};

// x = P of rows [i, i + rows) and keys [from, from + keys), where dropped negated; dx = dO V^T; and what they add to each row's D
template <bool PAIRS>
void probabilities(const Head& h, int64_t i, int64_t rows, int64_t from, int64_t keys, const Backward& b, float* x, float* dx, float* inner) {
    const Problem& p = h.p;
    scores<PAIRS>(x, PAIRS ? b.pairs_q : b.q, rows, p.wide, b.k_panels, p.d, from, keys, p.scale);
    scores<PAIRS>(dx, PAIRS ? b.pairs_grad : b.grad, rows, p.wide, b.v_panels, p.d, from, keys, 1);
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
template <bool PAIRS, class T>
void differentiate(const Head& h, int64_t i, int64_t rows, const Backward& b) {
    const Problem& p = h.p;
    const int64_t d = p.d, wide = p.wide, step = p.heads * d;
    const T *q = static_cast<const T*>(p.q) + h.queries(i), *grad = static_cast<const T*>(p.grad) + h.queries(i);
    gather(b.q, q, rows, step, d, wide, p.scale);
    gather(b.grad, grad, rows, step, d, wide, 1.0f);
    if constexpr (PAIRS) gather_pairs(b.pairs_q, q, rows, step, d, wide), gather_pairs(b.pairs_grad, grad, rows, step, d, wide);
    clear(b.dq, 0, ROWS * wide);
    int64_t begin, end;
    h.seen(i, rows, begin, end);
    float inner[ROWS] = {};
    const auto each_tile = [&](auto f) {
        int64_t at = 0;
        for (int64_t from = begin; from < end; from += KEYS, at += ROWS * LINE) f(from, least(KEYS, end - from), b.x + at, b.dx + at);
    };
    each_tile([&](int64_t from, int64_t keys, float* x, float* dx) { probabilities<PAIRS>(h, i, rows, from, keys, b, x, dx, inner); });
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
        product<true>(keys, wide, rows, x, LINE, b.grad, wide, b.dv + from * wide, wide, true);
        product<true>(keys, wide, rows, dx, LINE, b.q, wide, b.dk + from * wide, wide, true);
        product<false>(rows, wide, keys, dx, LINE, b.k + from * wide, wide, b.dq, wide, true);
    });
    scatter(static_cast<T*>(p.dq) + h.queries(i), b.dq, rows, step, d, wide, p.scale);
}

template <bool PAIRS, class T>
void backward_of(const Problem& p, int64_t sequence, int64_t kv, Scratch& scratch) {
    const Head one(p, sequence, kv * p.group());
    const int64_t t = one.t, d = p.d, wide = p.wide, step = p.kv * d;
    scratch.at = scratch.block;
    const Backward b(scratch, t, d, wide);
    const T *k = static_cast<const T*>(p.k) + one.keys(kv), *v = static_cast<const T*>(p.v) + one.keys(kv);
    turned<PAIRS>(b.k_panels, k, t, step, d);
    turned<PAIRS>(b.v_panels, v, t, step, d);
    gather(b.k, k, t, step, d, wide, 1.0f);
    clear(b.dk, 0, t * wide);
    clear(b.dv, 0, t * wide);
    for (int64_t g = 0; g < p.group(); g++) {
        const Head h(p, sequence, kv * p.group() + g);
        for (int64_t i = 0; i < h.s; i += ROWS) differentiate<PAIRS, T>(h, i, least(ROWS, h.s - i), b);
    }
    scatter(static_cast<T*>(p.dk) + one.keys(kv), b.dk, t, step, d, wide, 1.0f);
    scatter(static_cast<T*>(p.dv) + one.keys(kv), b.dv, t, step, d, wide, p.drop ? p.rate.scale : 1.0f);
}

template <bool PAIRS, class T>
bool backward(const Problem& p, int64_t longest_k) {
    // what shares an element of the mask's gradient is one task, in a fixed order
    const int64_t sequences = p.dmask && p.mask_b == 1 ? 1 : p.sequences, kvs = p.dmask && p.mask_h == 1 ? 1 : p.kv;
    return tasks(sequences * kvs, Backward::floats(longest_k, p.d, p.wide), [&](int64_t task, Scratch& scratch) {
        const int64_t a = task / kvs, b = task % kvs;
        for (int64_t sequence = a; sequence < p.sequences; sequence += sequences)
            for (int64_t kv = b; kv < p.kv; kv += kvs) backward_of<PAIRS, T>(p, sequence, kv, scratch);
    });
}

template <bool FORTH, bool PAIRS, class T>
bool compute(const Problem& p, int64_t longest_q, int64_t longest_k) {
    if constexpr (PAIRABLE && !PAIRS && std::is_same_v<T, bf16>)
        if (pairs_here() && p.d % 2 == 0) return compute<FORTH, true, T>(p, longest_q, longest_k);
    if constexpr (FORTH) return forward<PAIRS, T>(p, longest_q, longest_k);
    else return backward<PAIRS, T>(p, longest_k);
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
    MC_FOR_FLOAT(q.dtype, T, done = compute<true, false, T>(p, longest_q, longest_k))
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
    MC_FOR_FLOAT(q.dtype, T, done = compute<false, false, T>(p, longest_q, longest_k))
    if (!done) call.refuse("no memory");
}
