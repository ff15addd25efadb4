// c = or += a b scale + bias, of matrices in fp32 or bf16, multiplied in bf16 and summed in fp32, where a processor multiplies pairs of
// bf16 and adds both to a sum (AVX512-BF16). Other processors, and compilers that do not know of it, have no such kernel.
//
// Both factors are copied into panels: what a loop over what is summed over reads lies side by side, in pairs, whether a factor is
// turned or not, fp32 or bf16. So nothing is rounded, turned or added up in a pass of its own, there is one loop, and sizes that are
// no multiple of anything cost no more than others. Every element of c is summed in one order, whatever the threads.
#include "simd.h"

#if defined(__AVX512F__) && (defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 11)
#include <cstdlib>

#define MC_PAIRS __attribute__((target("avx512bf16")))

namespace {

constexpr int DOWN = 8, ACROSS = 3;  // sums in registers, of rows and of 16 columns; ACROSS of b and one of a are most of the rest
constexpr int64_t PANEL = ACROSS * LANES;  // columns of b that lie together

// DOWN rows of c and PANEL columns, over `steps` pairs of two panels
MC_PAIRS void tile(int64_t steps, const float* a, const float* b, float* c, bool add) {
    __m512 sums[DOWN][ACROSS];
#pragma GCC unroll 8
    for (int i = 0; i < DOWN; i++)
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++) sums[i][j] = _mm512_setzero_ps();
    for (int64_t s = 0; s < steps; s++, a += DOWN, b += PANEL) {
        __m512bh right[ACROSS];
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++) right[j] = (__m512bh)_mm512_loadu_ps(b + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < DOWN; i++) {
            const __m512bh left = (__m512bh)_mm512_set1_ps(a[i]);
#pragma GCC unroll 4
            for (int j = 0; j < ACROSS; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], left, right[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < DOWN; i++)
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++) {
            float* to = c + i * PANEL + j * LANES;
            _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), sums[i][j]) : sums[i][j]);
        }
}

// Two times 16 floats to pairs, one of each
MC_PAIRS vf zipped(vf first, vf second) {
    static const uint16_t ORDER[2 * LANES] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first));
    return reinterpret_cast<vf>(_mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER), (__m512i)both));
}

// 32 floats to 16 pairs of neighbours
MC_PAIRS vf halved(vf low, vf high) {
    return reinterpret_cast<vf>(_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low)));
}

MC_INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
MC_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- panels. Of a factor's axes `outer` is the one that the result has too, `depth` what is summed over, in steps of a pair.

MC_INLINE void transpose(vf* x) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) {  // exchange blocks of this size across the diagonal
        vi upper, lower;
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) upper[l] = l & half ? LANES + (l ^ half) : l, lower[l] = l & half ? LANES + l : l ^ half;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & half)) {
                const vf a = x[i], b = x[i + half];
                x[i] = pick(a, b, upper), x[i + half] = pick(a, b, lower);
            }
    }
}

template <class T>
MC_INLINE vf some(const T* p, int64_t n) {
    return n >= LANES ? load(p) : n > 0 ? load_some(p, n) : vf{};
}

// n numbers that follow each other in depth, as 16 pairs
MC_PAIRS MC_INLINE vf along(const float* p, int64_t n) { return halved(some(p, n), some(p + LANES, n - LANES)); }
MC_PAIRS MC_INLINE vf along(const bf16* p, int64_t n) {
    vf x{};
    memcpy(&x, p, n < 2 * LANES ? n * 2 : sizeof x);
    return x;
}
// n numbers, each with that `step` after it where there is a `second` of the pair
MC_PAIRS MC_INLINE vf beside(const float* p, int64_t step, int64_t n, bool second) {
    return zipped(some(p, n), second ? some(p + step, n) : vf{});
}
MC_PAIRS MC_INLINE vf beside(const bf16* p, int64_t step, int64_t n, bool second) {
    const vu high = second ? float_to_bits(some(p + step, n)) : vu{};
    return bits_to_float(float_to_bits(some(p, n)) >> 16 | high);
}

// 16 of `outer` (what there is of them, the rest zero) and one step, to where it is kept: panels of WIDE
template <int WIDE>
MC_INLINE void put(float* to, int64_t steps, int64_t group, int64_t step, vf x) {
    if constexpr (WIDE >= LANES) {
        store(to + (group / (WIDE / LANES) * steps + step) * WIDE + group % (WIDE / LANES) * LANES, x);
    } else {
        float all[LANES];
        store(all, x);
#pragma GCC unroll 4
        for (int i = 0; i < LANES / WIDE; i++) memcpy(to + ((group * (LANES / WIDE) + i) * steps + step) * WIDE, all + i * WIDE, 4 * WIDE);
    }
}

constexpr int64_t FEW = 4;  // groups of 16 at a time: so many as a row has in two lines of the cache

template <class T>
struct Factor {
    const T* data;
    int64_t stride;
    bool deep;  // depth lies side by side, and not `outer`

    // Groups [begin, end) of 16, of the panels of `outer` from `at` on, over `depth` from `from` on
    template <int WIDE>
    MC_PAIRS void pack(float* to, int64_t at, int64_t outer, int64_t from, int64_t depth, int64_t begin, int64_t end) const {
        const int64_t steps = (depth + 1) / 2, there = least(end, (outer + LANES - 1) / LANES);
        for (int64_t group = there > begin ? there : begin; group < end; group++)  // what is left of the last panel
            for (int64_t s = 0; s < steps; s++) put<WIDE>(to, steps, group, s, vf{});
        const T* p = data + from * stride + at;
        for (int64_t few = begin; !deep && few < there; few += FEW)
            for (int64_t s = 0; s < steps; s++)
                for (int64_t group = few; group < least(few + FEW, there); group++)
                    put<WIDE>(to, steps, group, s,
                              beside(p + 2 * s * stride + group * LANES, stride, outer - group * LANES, 2 * s + 1 < depth));
        for (int64_t group = begin; deep && group < there; group++) {
            const int64_t left = least(LANES, outer - group * LANES);
            const T* p = data + (at + group * LANES) * stride + from;
            for (int64_t s = 0; s < steps; s += LANES) {
                vf x[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) x[i] = i < left ? along(p + i * stride + 2 * s, depth - 2 * s) : vf{};
                transpose(x);
                for (int64_t i = 0; i < least(LANES, steps - s); i++) put<WIDE>(to, steps, group, s + i, x[i]);
            }
        }
    }
};

// ---- blocks

constexpr int64_t ROWS = 1024, COLUMNS = 1536, DEPTH = 4096;  // that lie in panels at a time
constexpr int64_t TALL = 128;                                 // rows of a task
constexpr int64_t STEPS = 768;                                // pairs of a panel: sums of more are sums of sums

struct Cut {  // n in even pieces of at most `most`, multiples of `of`
    int64_t n, size, count;
    Cut(int64_t n, int64_t most, int64_t of) : n(n) {
        const int64_t pieces = (n + most - 1) / most;
        size = pieces ? up((n + pieces - 1) / pieces, of) : 0;
        count = size ? (n + size - 1) / size : 0;
    }
    int64_t at(int64_t i) const { return i * size; }
    int64_t length(int64_t i) const { return least(size, n - i * size); }
};

MC_PAIRS MC_INLINE void keep(float* p, vf x, int n) { store_n(p, x, n); }
MC_PAIRS MC_INLINE void keep(bf16* p, vf x, int n) {
    _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), (__m256i)_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
}

template <class C>
struct Result {
    C* data;
    int64_t stride;
    const void* bias;
    Dtype bias_dtype;
    float scale;
    bool add;

    MC_INLINE vf shift(int64_t j, int n) const {
        if (!bias) return vf{};
        return bias_dtype == mc::F32 ? load_n(static_cast<const float*>(bias) + j, n) : load_n(static_cast<const bf16*>(bias) + j, n);
    }
    // rows x columns of a tile of PANEL to where they are in the result
    MC_PAIRS void write(const float* tile, int64_t i, int64_t rows, int64_t j, int64_t columns) const {
        vf more[ACROSS];
        int there[ACROSS];
        for (int64_t part = 0; part < ACROSS; part++) {
            const int64_t left = columns - part * LANES;
            there[part] = static_cast<int>(left < 0 ? 0 : least(LANES, left));
            more[part] = there[part] ? shift(j + part * LANES, there[part]) : vf{};
        }
        for (int64_t row = 0; row < rows; row++)  // what of a row lies in one line of the cache is written while that is near
#pragma GCC unroll 4
            for (int64_t part = 0; part < ACROSS; part++) {
                C* to = data + (i + row) * stride + j + part * LANES;
                const vf x = load(tile + row * PANEL + part * LANES) * scale + more[part];
                if (there[part]) keep(to, add ? load_n(to, there[part]) + x : x, there[part]);
            }
    }
};

template <class A, class B, class C>
bool multiply(int64_t m, int64_t n, int64_t k, Factor<A> a, Factor<B> b, Result<C> c) {
    const Cut rows(m, ROWS, LANES), columns(n, COLUMNS, PANEL), depths(k, DEPTH, LANES);
    const int64_t steps = (depths.size + 1) / 2, tall = up(rows.size, LANES), wide = up(columns.size, PANEL);
    const int64_t tasks_down = (tall + TALL - 1) / TALL, most = tasks_down * (wide / PANEL);
    const int64_t size = (tall + wide) * steps + most * TALL * PANEL;
    char* const block = static_cast<char*>(malloc(size * 4 + 64));
    if (!block) return false;
    float* const left = reinterpret_cast<float*>(block + (-reinterpret_cast<uintptr_t>(block) & 63));
    float *const right = left + tall * steps, *const tiles = right + wide * steps;
    int64_t left_is = -1, right_is = -1;
    for (int64_t r = 0; r < rows.count; r++)
        for (int64_t q = 0; q < columns.count; q++)
            for (int64_t d = 0; d < (depths.count ? depths.count : 1); d++) {
                const int64_t i0 = rows.at(r), j0 = columns.at(q), k0 = depths.at(d);
                const int64_t height = rows.length(r), width = columns.length(q), depth = depths.length(d);
                const int64_t here = (depth + 1) / 2, of_a = (height + LANES - 1) / LANES, of_b = up(width, PANEL) / LANES;
                const bool pack_a = left_is != r * depths.count + d, pack_b = right_is != q * depths.count + d;
                left_is = r * depths.count + d, right_is = q * depths.count + d;
                const int64_t first = pack_a ? of_a : 0;
                mc::parallel(first + (pack_b ? of_b : 0), 1, [=](int64_t begin, int64_t end) {
                    if (begin < first) a.template pack<DOWN>(left, i0, height, k0, depth, begin, least(end, first));
                    if (end > first) b.template pack<PANEL>(right, j0, width, k0, depth, begin > first ? begin - first : 0, end - first);
                });
                const int64_t down = (height + TALL - 1) / TALL, across = (width + PANEL - 1) / PANEL;
                const bool last = d + 1 >= depths.count, whole = depths.count <= 1;
                mc::parallel(down * across, 1, [=](int64_t begin, int64_t end) {
                    for (int64_t task = begin; task < end; task++) {
                        const int64_t i = task / across * TALL, j = task % across * PANEL;
                        const int64_t tall_here = least(TALL, height - i);
                        float* const to = tiles + (whole ? begin : task) * TALL * PANEL;
                        for (int64_t s = 0; s < here || s == 0; s += STEPS) {
                            const int64_t some = least(STEPS, here - s);
                            for (int64_t row = 0; row < tall_here; row += DOWN)
                                tile(some, left + ((i + row) / DOWN * here + s) * DOWN, right + (j / PANEL * here + s) * PANEL,
                                     to + row * PANEL, d > 0 || s > 0);
                        }
                        if (last) c.write(to, i0 + i, tall_here, j0 + j, least(PANEL, width - j));
                    }
                });
            }
    free(block);
    return true;
}

}  // namespace

// a is m x k, or k x m where `a_turned`; b is k x n, or n x k where `b_turned`; c is m x n. Rows may be longer than what is read of them.
MC_KERNEL(product) {
    const Array c = call.inout("c", F32 | BF16);
    const Array a = call.in("a", F32 | BF16), b = call.in("b", F32 | BF16);
    const Array bias = call.maybe("bias", F32 | BF16);
    const int64_t n = call.integer("n", 0), k = call.integer("k", 0);
    const bool a_turned = call.flag("a_turned"), b_turned = call.flag("b_turned"), add = call.flag("add");
    const double scale = call.real("scale");
    if (c.shape.rank != 2 || a.shape.rank != 2 || b.shape.rank != 2) call.refuse("c, a and b: wanted 2 dimensions");
    const int64_t m = c.shape.at[0];
    const auto fits = [](const Array& x, int64_t rows, int64_t last) { return x.shape.at[0] == rows && x.shape.at[1] >= last; };
    if (c.shape.at[1] < n || !fits(a, a_turned ? k : m, a_turned ? m : k) || !fits(b, b_turned ? n : k, b_turned ? k : n))
        call.refuse("c, a and b: sizes that do not belong together");
    if (bias && bias.shape.count() != n) call.refuse("bias: not of %lld elements", static_cast<long long>(n));
    if (!__builtin_cpu_supports("avx512bf16")) call.refuse("this processor does not multiply pairs of bf16");
    call.ready();
    if (!m || !n) return;
    bool done = true;
    const auto run = [&](auto one, auto other, auto result) {
        using A = decltype(one);
        using B = decltype(other);
        using C = decltype(result);
        const Result<C> to{c.as<C>(), c.shape.at[1], bias ? bias.data : nullptr, bias.dtype, static_cast<float>(scale), add};
        done = multiply<A, B, C>(m, n, k, {a.as<const A>(), a.shape.at[1], !a_turned}, {b.as<const B>(), b.shape.at[1], b_turned}, to);
    };
    const auto with = [&](auto one, auto other) { c.dtype == F32 ? run(one, other, float{}) : run(one, other, bf16{}); };
    const auto of = [&](auto one) { b.dtype == F32 ? with(one, float{}) : with(one, bf16{}); };
    a.dtype == F32 ? of(float{}) : of(bf16{});
    if (!done) call.refuse("no memory for the product");
}
#endif
