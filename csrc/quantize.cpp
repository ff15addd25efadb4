// Weights in 4 bits (NF4) and 8 bits: quantise, dequantise, and the product with a few rows of activations, which reads the codes
// themselves. A row is never shared between threads, so their number changes nothing.
#include "quantize.h"

#include "simd.h"

namespace {

struct Rows {
    int64_t rows, cols, bytes, groups;  // of a matrix in NF4
    Rows(const Shape& shape, int64_t cols) : rows(shape.rows()), cols(cols), bytes((cols + 1) / 2), groups((cols + GROUP - 1) / GROUP) {}
};

// ---- NF4

// Entries of a table of 16, chosen by the 16 halves of 8 bytes.
#if defined(__AVX512F__)
MC_INLINE vf lookup(vf table, const uint8_t* p) {
    const __m512i half = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i shift = _mm512_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24, 4, 0, 12, 8, 20, 16, 28, 24);
    const __m512i both = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m512i index = _mm512_srlv_epi32(_mm512_permutexvar_epi32(half, both), shift);  // its low 4 bits are read
    return reinterpret_cast<vf>(_mm512_permutexvar_ps(index, reinterpret_cast<__m512>(table)));
}
#elif defined(__AVX2__)
MC_INLINE vf lookup(vf table, const uint8_t* p) {
    const __m256i shift = _mm256_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24);
    const __m256 below = reinterpret_cast<__m256>(part<pf>(table, 0)), above = reinterpret_cast<__m256>(part<pf>(table, 1));
    return of_parts<vf>(MC_PART {
        int32_t word;
        memcpy(&word, p + 4 * i, 4);
        const __m256i index = _mm256_srlv_epi32(_mm256_set1_epi32(word), shift);  // its low 3 bits are read
        const __m256 low = _mm256_permutevar8x32_ps(below, index), high = _mm256_permutevar8x32_ps(above, index);
        return reinterpret_cast<pf>(_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28))));  // by bit 3
    });
}
#else
MC_INLINE vf lookup(vf table, const uint8_t* p) {
    float from[LANES], to[LANES];
    store(from, table);
    for (int i = 0; i < LANES / 2; i++) to[2 * i] = from[p[i] >> 4], to[2 * i + 1] = from[p[i] & 15];
    return load(to);
}
#endif
MC_INLINE vf lookup_n(vf table, const uint8_t* p, int n) {
    if (n == LANES) return lookup(table, p);
    uint8_t some[LANES / 2] = {};
    memcpy(some, p, (n + 1) / 2);
    return lookup(table, some);
}

// The largest magnitude of n elements, which NaN is above.
template <class T>
MC_INLINE float most(const T* x, int64_t n) {
    vi top{};
    each(n, [&](int64_t i, int lanes) MC_INLINED { top = higher(top, as<vi>(vabs(load_n(x + i, lanes)))); });
    const float scale = highest(top);
    return scale < TINY ? 0.0f : scale;
}

template <class T>
void quantize_group(const T* x, uint8_t* codes, float* scale, int64_t n) {
    static const float middles[] = {MC_NF4_MIDDLES};
    *scale = most(x, n);
    const float by = *scale == 0 ? 1.0f : *scale;
    each(n, [&](int64_t i, int lanes) {
        const vi code = by_parts<pi, pf>(vi{}, load_n(x + i, lanes) / by, [](pi above, pf level) {
            for (float middle : middles) above -= level > middle;  // a comparison that holds is -1; none holds for a NaN
            return above;
        });
        uint8_t half[LANES];
        store(half, code);
        if (lanes % 2) half[lanes] = ZERO_CODE;
        for (int j = 0; j < (lanes + 1) / 2; j++) codes[i / 2 + j] = static_cast<uint8_t>(half[2 * j] << 4 | half[2 * j + 1]);
    });
}

// f(row, group, weights in it) for every group of every row
template <class F>
void each_group(const Rows& m, int64_t grain, F f) {
    mc::parallel(m.rows * m.groups, grain, [&m, f](int64_t begin, int64_t end) {
        int64_t row = begin / m.groups, group = begin % m.groups;
        for (int64_t i = begin; i < end; i++) {
            const int64_t left = m.cols - group * GROUP;
            f(row, group, left < GROUP ? left : GROUP);
            if (++group == m.groups) group = 0, row++;
        }
    });
}

template <class T>
void quantize_all(const Rows& m, const T* x, uint8_t* codes, float* scales) {
    each_group(m, 64, [=, &m](int64_t row, int64_t group, int64_t n) {
        quantize_group(x + row * m.cols + group * GROUP, codes + row * m.bytes + group * GROUP / 2, scales + row * m.groups + group, n);
    });
}

template <class T>
void dequantize_all(const Rows& m, const uint8_t* codes, const float* scales, T* y) {
    const vf levels = {MC_NF4_LEVELS};
    each_group(m, 256, [=, &m](int64_t row, int64_t group, int64_t n) {
        const vf table = levels * scales[row * m.groups + group];
        const uint8_t* from = codes + row * m.bytes + group * GROUP / 2;
        T* to = y + row * m.cols + group * GROUP;
        each(n, [&](int64_t i, int lanes) { store_n(to + i, lookup_n(table, from + i / 2, lanes), lanes); });
    });
}

// y (N rows) = x (N cols) @ W^T + bias, a row of W at a time: its codes are read once
template <int N>
void product(const Rows& m, const float* x, const uint8_t* codes, const float* scales, const float* bias, float* y) {
    const vf levels = {MC_NF4_LEVELS};
    mc::parallel(m.rows, 1 + 65536 / (1 + m.cols), [=, &m](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            vf sums[N][2] = {};
            for (int64_t group = 0; group < m.groups; group++) {
                const vf table = levels * scales[row * m.groups + group];
                const uint8_t* from = codes + row * m.bytes + group * GROUP / 2;
                const int64_t left = m.cols - group * GROUP;
                each(left < GROUP ? left : GROUP, [&](int64_t i, int lanes) {
                    const vf w = lookup_n(table, from + i / 2, lanes);
                    for (int n = 0; n < N; n++) sums[n][i / LANES % 2] += w * load_n(x + n * m.cols + group * GROUP + i, lanes);
                });
            }
            for (int n = 0; n < N; n++) y[n * m.rows + row] = sum(sums[n][0] + sums[n][1]) + (bias ? bias[row] : 0.0f);
        }
    });
}

// ---- int8

template <class T>
void quantize_rows(const T* x, int8_t* codes, float* scales, int64_t rows, int64_t cols) {
    mc::parallel(rows, 1 + 16384 / (1 + cols), [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const T* from = x + row * cols;
            const float scale = most(from, cols), step = scale == 0 ? 1.0f : scale / 127.0f;
            scales[row] = scale;
            each(cols, [&](int64_t i, int lanes) {
                const vf level = load_n(from + i, lanes) / step;
                const vf shifted = level + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits, ties to even
                const vi q = by_parts<pi, pf>(as<vi>(float_to_bits(shifted) - 0x4B400000u), level, [](pi q, pf level) {
                    return level == level ? q : pi{};
                });
                store_n(reinterpret_cast<uint8_t*>(codes) + row * cols + i, q, lanes);
            });
        }
    });
}

template <class T>
void dequantize_rows(const int8_t* codes, const float* scales, T* y, int64_t rows, int64_t cols) {
    mc::parallel(rows, 1 + 16384 / (1 + cols), [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const float scale = scales[row];
            each(cols, [&](int64_t i, int lanes) {
                const vf q = load_n(codes + row * cols + i, lanes);
                store_n(y + row * cols + i, (q * HIGH + q * LOW) * scale, lanes);
            });
        }
    });
}

template <int N>
void product(const int8_t* codes, const float* scales, const float* x, const float* bias, float* y, int64_t rows, int64_t cols) {
    mc::parallel(rows, 1 + 65536 / (1 + cols), [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            vf sums[N][2] = {};
            each(cols, [&](int64_t i, int lanes) {
                const vf q = load_n(codes + row * cols + i, lanes);
                for (int n = 0; n < N; n++) sums[n][i / LANES % 2] += q * load_n(x + n * cols + i, lanes);
            });
            for (int n = 0; n < N; n++)
                y[n * rows + row] = sum(sums[n][0] + sums[n][1]) * (scales[row] / 127.0f) + (bias ? bias[row] : 0.0f);
        }
    });
}

template <int N>
struct Number {
    static constexpr int value = N;
};
template <int N = Product::FEW, class F>
void with_constant(int64_t n, F f) {  // f(Number<n>), 1 <= n <= N
    if constexpr (N > 1)
        if (n < N) return with_constant<N - 1>(n, f);
    f(Number<N>{});
}

}  // namespace

MC_KERNEL(quantize_nf4) {
    const Quantize a(call, true);
    const Rows m(a.x.shape, a.x.shape.last());
    MC_FOR_FLOAT(a.x.dtype, T, quantize_all(m, a.x.as<T>(), a.codes.as<uint8_t>(), a.scales.as<float>()))
}

MC_KERNEL(dequantize_nf4) {
    const Dequantize a(call, true);
    const Rows m(a.y.shape, a.y.shape.last());
    MC_FOR_FLOAT(a.y.dtype, T, dequantize_all(m, a.codes.as<uint8_t>(), a.scales.as<float>(), a.y.as<T>()))
}

MC_KERNEL(product_nf4) {
    const Product p(call, true, F32);
    const Rows m(Shape{p.rows, p.cols}, p.cols);
    if (p.n)
        with_constant(p.n, [&](auto n) {
            product<decltype(n)::value>(m, p.x.as<float>(), p.codes.as<uint8_t>(), p.scales.as<float>(), p.bias.as<float>(), p.y.as<float>());
        });
}

MC_KERNEL(quantize_int8) {
    const Quantize a(call, false);
    const Shape& shape = a.x.shape;
    MC_FOR_FLOAT(a.x.dtype, T, quantize_rows(a.x.as<T>(), a.codes.as<int8_t>(), a.scales.as<float>(), shape.rows(), shape.last()))
}

MC_KERNEL(dequantize_int8) {
    const Dequantize a(call, false);
    const Shape& shape = a.y.shape;
    MC_FOR_FLOAT(a.y.dtype, T, dequantize_rows(a.codes.as<int8_t>(), a.scales.as<float>(), a.y.as<T>(), shape.rows(), shape.last()))
}

MC_KERNEL(product_int8) {
    const Product p(call, false, F32);
    if (p.n)
        with_constant(p.n, [&](auto n) {
            product<decltype(n)::value>(
                p.codes.as<int8_t>(), p.scales.as<float>(), p.x.as<float>(), p.bias.as<float>(), p.y.as<float>(), p.rows, p.cols);
        });
}
