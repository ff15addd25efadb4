// Products of matrices that lie in cache, and how their factors are laid out, by what the processor multiplies (Units):
//
//   SINGLE  numbers in fp32
//   PAIRS   pairs of bf16, both of which are added to a sum in fp32 (AVX512-BF16): twice the products of an instruction
//   TILES   16 rows of 32 bf16 by 32 rows of 16, added to 16 x 16 sums in fp32 (AMX): sixteen times
//
// A number that has more digits than bf16 is two for TILES, of which the second is what the first has cut off: 17 of 24 digits for two
// products. Neither subnormal factors nor subnormal sums are told from 0 by the latter two.
#pragma once
#include <cstdlib>
#include <type_traits>

#include "simd.h"
#if defined(__AVX512F__) && (defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 11)
#define MC_PAIRS __attribute__((target("avx512bf16")))
#endif
#if !defined(MC_TILES) && defined(MC_PAIRS) && defined(__linux__) && (!defined(__clang__) || __clang_major__ >= 12)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define MC_TILES __attribute__((target("amx-tile,amx-bf16")))
static bool tiles_here() {  // Linux gives a process the registers when it asks for them
    constexpr int REQUEST = 0x1023, REGISTERS = 18;
    constexpr unsigned wanted = 1u << 22 | 1u << 24;
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & wanted) == wanted && !syscall(SYS_arch_prctl, REQUEST, REGISTERS);
}
#endif

namespace {

enum Units { SINGLE, PAIRS, TILES };

constexpr MC_INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
constexpr MC_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr MC_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- numbers in fp32: c (m x n) = or += a (m x k) b (k x n), with registers of the processor's own width

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

// ---- pairs of bf16

#if defined(MC_PAIRS)
constexpr bool PAIRED = true;

// k pairs: c = sums * times
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
constexpr bool PAIRED = false;
template <int N>
void tile_of_pairs(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, float times);
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

// ---- AMX

// A matrix of bf16 that lies in pairs, each a float to what only moves it. On the left of a product a row has 16 pairs for 32 of its
// numbers, on the right 16 rows have pairs of 32 numbers one above the other; which are a pair is the same on both sides.
struct Factor {
    const float* at;
    int64_t line, step;  // floats from a row to the next, and from 32 of what is summed over to the next
    int64_t low;         // floats to what the same numbers have cut off
};

template <Units U>
struct Shaped {};  // while it lives there may be products of U

#if defined(MC_TILES)
constexpr bool TILED = true;

// Compilers do not know what memory instructions of tiles read.
MC_INLINE void all_is_written(const void* at) { __asm__ volatile("" : : "r"(at) : "memory"); }

// Others in this process compute with these registers too, and may rely on what they said of their shape.
template <>
struct Shaped<TILES> {
    struct alignas(64) Shape {
        uint8_t palette, row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } before;
    MC_TILES Shaped() {
        Shape shape{};
        shape.palette = 1;
        for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
        all_is_written(&before), all_is_written(&shape);
        _tile_storeconfig(&before);
        _tile_loadconfig(&shape);
    }
    MC_TILES ~Shaped() {
        all_is_written(&before);
        _tile_loadconfig(&before);
    }
};

// c (m x n) = or += a (m x k) b (k x n), multiples of 32; of one of both what its numbers have cut off is multiplied too
template <bool LEFT, bool RIGHT>
MC_TILES void product_of_tiles(int64_t m, int64_t n, int64_t k, Factor a, Factor b, float* c, int64_t ldc, bool add) {
    all_is_written(c);
    const int64_t a_line = a.line * 4, b_line = b.line * 4, c_line = ldc * 4;
// clang-format off
#define MC_LEFT(from) _tile_loadd(4, from, a_line); _tile_loadd(5, (from) + 16 * a.line, a_line);
#define MC_RIGHT(from) _tile_loadd(6, from, b_line); _tile_loadd(7, (from) + 16, b_line);
#define MC_MULTIPLY _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    for (int64_t j = 0; j < n; j += 32)
        for (int64_t i = 0; i < m; i += 32) {
            const float *left = a.at + i * a.line, *right = b.at + j;
            float *to = c + i * ldc + j, *lower = to + 16 * ldc;
            if (add) {
                _tile_loadd(0, to, c_line); _tile_loadd(1, to + 16, c_line);
                _tile_loadd(2, lower, c_line); _tile_loadd(3, lower + 16, c_line);
            } else {
                _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
            }
            for (int64_t at = 0; at < k; at += 32, left += a.step, right += b.step) {
                MC_LEFT(left) MC_RIGHT(right) MC_MULTIPLY
                if constexpr (LEFT) { MC_LEFT(left + a.low) MC_MULTIPLY }
                if constexpr (RIGHT) { MC_RIGHT(right + b.low) MC_MULTIPLY }
            }
            _tile_stored(0, to, c_line); _tile_stored(1, to + 16, c_line);
            _tile_stored(2, lower, c_line); _tile_stored(3, lower + 16, c_line);
        }
#undef MC_LEFT
#undef MC_RIGHT
#undef MC_MULTIPLY
    // clang-format on
    all_is_written(c);
}
#else
constexpr bool TILED = false;
template <bool LEFT, bool RIGHT>
void product_of_tiles(int64_t m, int64_t n, int64_t k, Factor a, Factor b, float* c, int64_t ldc, bool add);
#endif

// The best there is here for bf16; SINGLE if MODELCENTER_CPU names an instruction set, none of which has units for it
inline Units units() {
    if (const char* limit = std::getenv("MODELCENTER_CPU"); limit && *limit) return SINGLE;
#if defined(MC_TILES)
    if (static const bool here = tiles_here(); here) return TILES;
#endif
#if defined(MC_PAIRS)  // Intel's take two cycles where a multiplication in fp32 takes one
    if (__builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel")) return PAIRS;
#endif
    return SINGLE;
}

// ---- layouts

constexpr int PANEL = 64;  // columns of a matrix that was turned

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

// The same in pairs of neighbours: rows of wide / 2.
MC_INLINE void gather_pairs(float* to, const bf16* from, int64_t rows, int64_t step, int64_t d, int64_t wide, float scale) {
    for (int64_t i = 0; i < rows; i++) {
        bf16* row = reinterpret_cast<bf16*>(to + i * (wide / 2));
        memset(row, 0, wide * 2);
        each(d, [&](int64_t c, int n) MC_INLINED { store_n(row + c, load_n(from + i * step + c, n) * scale, n); });
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

// rows of d at a distance to panels of `deep` x PANEL, the rows past the last and what is past d zero
template <class T>
void turn(float* to, const T* from, int64_t rows, int64_t step, int64_t d, int64_t deep) {
    for (int64_t j = 0; j < up(rows, PANEL); j += LANES) {
        float* panel = to + j / PANEL * PANEL * deep + j % PANEL;
        for (int64_t c = d; c < deep; c++) store(panel + c * PANEL, vf{});
        each(d, [&](int64_t c, int n) MC_INLINED {
            vf x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) x[i] = j + i < rows ? load_n(from + (j + i) * step + c, n) : vf{};
            exchange<8>(x), exchange<4>(x), exchange<2>(x), exchange<1>(x);
            for (int i = 0; i < n; i++) store(panel + (c + i) * PANEL, x[i]);
        });
    }
}

// Two vectors as 16 pairs of bf16 and, if `low`, as 16 of what those have cut off
MC_INLINE void split(vf a, vf b, float* high, float* low) {
    const auto paired = [](vu x, vu y) MC_INLINED { return bits_to_float(x >> 16 | (y & 0xFFFF0000u)); };
    const auto rest = [](vf x) MC_INLINED { return float_to_bits(x - bits_to_float(float_to_bits(x) & 0xFFFF0000u)) + 0x8000u; };
    store(high, paired(float_to_bits(a), float_to_bits(b)));
    if (low) store(low, paired(rest(a), rest(b)));
}
// Rows of floats in place: of every 32 of a row 16 pairs, then what those have cut off. A Factor of line, 32, 16 for the left.
MC_INLINE void split_rows(float* x, int64_t rows, int64_t line, int64_t n) {
    for (int64_t i = 0; i < rows; i++)
        for (float* at = x + i * line; at < x + i * line + n; at += 32) split(load(at), load(at + 16), at, at + 16);
}
// Of every 32 rows 16 of pairs, then 16 of what those have cut off. A Factor of line, 32 line, 16 line for the right.
MC_INLINE void split_columns(float* to, const float* x, int64_t rows, int64_t line, int64_t n) {
    for (int64_t i = 0; i < up(rows, 32); i += i % 32 == 15 ? 17 : 1)
        for (int64_t j = 0; j < n; j += LANES) {
            const vf a = i < rows ? load(x + i * line + j) : vf{}, b = i + 16 < rows ? load(x + (i + 16) * line + j) : vf{};
            split(a, b, to + i * line + j, to + (i + 16) * line + j);
        }
}
// Of every 32 rows of bf16 16 of pairs, `wide` long. A Factor of wide, 16 wide for the right.
MC_INLINE void pair_rows(float* to, const bf16* from, int64_t rows, int64_t step, int64_t d, int64_t wide) {
    for (int64_t i = 0; i < up(rows, 32); i += i % 32 == 15 ? 17 : 1, to += wide) {
        memset(to, 0, wide * 4);
        each(d, [&](int64_t c, int n) MC_INLINED {
            const vf a = i < rows ? load_n(from + i * step + c, n) : vf{}, b = i + 16 < rows ? load_n(from + (i + 16) * step + c, n) : vf{};
            split(a, b, to + c, nullptr);
        });
    }
}

}  // namespace
