// AdamW on the CPU: unscale, clip, update and cast in one pass over all tensors of a call; the squared norm in another. What a
// chunk holds depends on the tensors alone, so that results do not depend on the number of threads.
#include <type_traits>

#include "random.h"
#include "simd.h"

namespace {

MC_INLINE vf square_root(vf x) {
    return of_parts<vf>(MC_PART {
#if defined(__AVX512F__)
        return reinterpret_cast<pf>(_mm512_sqrt_ps(reinterpret_cast<__m512>(part<pf>(x, i))));
#elif defined(__AVX2__)
        return reinterpret_cast<pf>(_mm256_sqrt_ps(reinterpret_cast<__m256>(part<pf>(x, i))));
#else
        pf root = part<pf>(x, i);
        for (int l = 0; l < PART; l++) root[l] = __builtin_sqrtf(root[l]);
        return root;
#endif
    });
}

struct Plain {
    MC_INLINE vf root(vf x) const { return square_root(x); }
    MC_INLINE vf ratio(vf a, vf b) const { return a / b; }
};

}  // namespace

#include "adamw.h"

namespace {

// 32 random bits for each of 64 elements from 64 * group on: word e % 4 of counter e / 4.
MC_NOINLINE void draw_words(vu out[4], uint64_t group, uint64_t key) {
    const vu order = MC_COUNTERS;
    vu a = order + static_cast<uint32_t>(group << 4), b = vu{} + static_cast<uint32_t>(group >> 28), c{}, d{};
    philox(a, b, c, d, key);
    by_counter(out, a, b, c, d);
}

// bf16, up or down with the probability that makes it right in the mean: by adding 16 random bits below its last place.
MC_INLINE vh round_at_random(vf x, vu random) {
    return narrow(as<vu>(by_parts<pf, pu>(x, random, [](pf x, pu random) {
        const pu u = reinterpret_cast<pu>(x), nan = (u >> 16) | 0x40u;
        return reinterpret_cast<pf>(x != x ? nan : (u + random) >> 16);
    })));
}

template <bool STOCHASTIC, class T>
MC_INLINE void put(T* p, vf x, vu random, int n) {
    if constexpr (STOCHASTIC && sizeof(T) == 2) {
        const vh rounded = round_at_random(x, random);
        if (n == LANES) *reinterpret_cast<vh_any*>(p) = rounded;
        else memcpy(p, &rounded, n * sizeof(T));
    } else {
        store_n(p, x, n);
    }
}

// `half`: copies are fp16, or else bf16
MC_INLINE void put_copy(void* copies, int64_t i, vf x, bool half, int n) {
    if (half) store_n(static_cast<fp16*>(copies) + i, x, n);
    else if (copies) store_n(static_cast<bf16*>(copies) + i, x, n);
}

template <class P, class G, class M, bool STOCHASTIC>
void update_some(const Item& item, int64_t begin, int64_t end, float factor, const Numbers& c, bool half) {
    P* const p = static_cast<P*>(item.p);
    const G* const g = static_cast<const G*>(item.g);
    M *const m = static_cast<M*>(item.m), *const v = static_cast<M*>(item.v);
    for (int64_t block = begin; block < end; block += 4 * LANES) {  // begin is a multiple of CHUNK
        vu random[4] = {};
        if (STOCHASTIC && (sizeof(M) == 2 || sizeof(P) == 2)) draw_words(random, block / 64, item.key);
        const auto some = [&](int k, int n) {
            const int64_t i = block + k * LANES;
            vf x = load_n(p + i, n), y = load_n(m + i, n), z = load_n(v + i, n);
            update(x, y, z, load_n(g + i, n), factor, c, item, Plain{});
            put<STOCHASTIC>(p + i, x, bits_of_p(random[k]), n);
            put<STOCHASTIC>(m + i, y, bits_of_m(random[k]), n);
            put<STOCHASTIC>(v + i, z, bits_of_v(random[k]), n);
            if (sizeof(P) == 4) put_copy(item.copy, i, x, half, n);
        };
        const int64_t left = end - block;
        if (left >= 4 * LANES)
            for (int k = 0; k < 4; k++) some(k, LANES);
        else
            for (int k = 0; k * LANES < left; k++) some(k, left - k * LANES < LANES ? static_cast<int>(left - k * LANES) : LANES);
    }
}

// ---- 8-bit moments, as in optim/adamw.py: 128 elements at a time, which share a scale

constexpr int SHARED = BLOCK8 / LANES;  // vectors of a block
template <bool FOURTH>
MC_INLINE vf decoded(vf code) {  // from a code's magnitude to a number between 0 and 1
    const vf x = code * (FOURTH ? static_cast<float>(1.0 / 255) : static_cast<float>(1.0 / 127));
    return FOURTH ? (x * x) * (x * x) : x * x;
}
template <bool FOURTH>
MC_INLINE vf encoded(vf x, float scale, vf chance) {  // the code's magnitude
    const vf share = scale > 0 && scale < INFINITY ? vabs(x) / scale : vf{};
    const vf root = square_root(share), high = FOURTH ? square_root(root) * 255.0f : root * 127.0f;
    const vf low = whole_numbers(truncated(high));  // none is negative
    const vf below = decoded<FOURTH>(low), above = decoded<FOURTH>(low + 1.0f);
    const vf past = (share - below) * 65536.0f, wanted = (above - below) * chance;
    const vf code = low + by_parts<pf, pf>(past, wanted, [](pf past, pf wanted) { return past > wanted ? pf{} + 1.0f : pf{}; });
    if constexpr (FOURTH)
        return choose<pf>(x, vmin(vmax(code, all(2.0f)), all(255.0f)), code, [](pf x) { return x > 0.0f; });
    return vmin(code, all(127.0f));
}

template <class P, class G, bool STOCHASTIC>
void update_coded(const Item& item, int64_t begin, int64_t end, float factor, const Numbers& c, bool half) {
    P* const p = static_cast<P*>(item.p);
    const G* const g = static_cast<const G*>(item.g);
    int8_t* const m = static_cast<int8_t*>(item.m);
    uint8_t* const v = static_cast<uint8_t*>(item.v);
    const auto one_block = [&](int64_t block, auto lanes) {  // lanes(k): elements of vector k, none of them after the last
        const int64_t number = block / BLOCK8;
        float m_scale = item.m_scale[number], v_scale = item.v_scale[number];
        vu random[SHARED] = {};
        for (int k = 0; STOCHASTIC && k < SHARED; k += 4) draw_words(random + k, (block + k * LANES) / 64, item.key);
        vf ys[SHARED], zs[SHARED];
        vi top{}, top_squared{};
        for (int k = 0; k < SHARED && lanes(k) > 0; k++) {
            const int64_t i = block + k * LANES;
            const int n = lanes(k);
            const vf code = load_n(m + i, n), size = decoded<false>(vabs(code)) * m_scale;
            vf x = load_n(p + i, n), y = choose<pf>(code, -size, size, [](pf code) { return code < 0.0f; });
            vf z = decoded<true>(load_n(v + i, n)) * v_scale;
            update(x, y, z, load_n(g + i, n), factor, c, item, Plain{});
            put<STOCHASTIC>(p + i, x, bits_of_p(random[k]), n);
            if (sizeof(P) == 4) put_copy(item.copy, i, x, half, n);
            const auto there = [=](vf x) MC_INLINED {  // the others may be NaN
                return as<vi>(n == LANES ? vabs(x) : only(vabs(x), n, 0.0f));
            };
            top = higher(top, there(y)), top_squared = higher(top_squared, there(z));
            ys[k] = y, zs[k] = z;
        }
        item.m_scale[number] = m_scale = highest(top), item.v_scale[number] = v_scale = highest(top_squared);
        const auto chance = [](vu bits) {
            return STOCHASTIC ? whole_numbers(as<vi>(bits)) + 0.5f : all(32768.0f);
        };
        for (int k = 0; k < SHARED && lanes(k) > 0; k++) {
            const int64_t i = block + k * LANES;
            const vf code = encoded<false>(ys[k], m_scale, chance(bits_of_m(random[k])));
            const vf code_signed = choose<pf>(ys[k], -code, code, [](pf y) { return y < 0.0f; });
            store_n(reinterpret_cast<uint8_t*>(m) + i, truncated(code_signed), lanes(k));
            store_n(v + i, truncated(encoded<true>(zs[k], v_scale, chance(bits_of_v(random[k])))), lanes(k));
        }
    };
    for (int64_t block = begin; block < end; block += BLOCK8) {  // begin is a multiple of CHUNK
        const int64_t left = end - block;
        if (left >= BLOCK8) one_block(block, [](int) { return LANES; });
        else one_block(block, [=](int k) { return left - k * LANES < LANES ? static_cast<int>(left - k * LANES) : LANES; });
    }
}

// f(number of the piece, its item, its first element, its last + 1) for every piece of `size` elements of the items in a table
template <class F>
void each_piece(const Item* items, int64_t pieces, int64_t size, F f) {
    mc::parallel(pieces, 1, [=](int64_t begin, int64_t end) {
        const Item* item = items;
        for (int64_t piece = begin; piece < end; piece++) {
            while (piece >= item->first + (item->n + size - 1) / size) item++;
            const int64_t at = (piece - item->first) * size;
            f(piece, *item, at, at + size < item->n ? at + size : item->n);
        }
    });
}

typedef float half_pf __attribute__((vector_size(2 * PART)));
typedef double pd __attribute__((vector_size(4 * PART)));

// In fp64, which costs nothing beside the memory and which no square overflows.
template <class G>
double squares(const G* g, int64_t n) {
    constexpr int HALVES = 2 * PARTS;
    pd sums[HALVES] = {};
    each(n, [&](int64_t i, int lanes) MC_INLINED {
        const vf x = load_n(g + i, lanes);
        half_pf halves[HALVES];
        memcpy(halves, &x, sizeof x);
#pragma GCC unroll 8
        for (int k = 0; k < HALVES; k++) {
            const pd wide = __builtin_convertvector(halves[k], pd);
            sums[k] += wide * wide;
        }
    });
    double all[LANES], total = 0;
    memcpy(all, sums, sizeof all);
    for (int i = 0; i < LANES / 2; i++) total += all[i] + all[i + LANES / 2];
    return total;
}

}  // namespace

MC_KERNEL(adamw_squares) {
    const SquaresArguments given(call);
    call.ready();
    Item* const items = given.table.as<Item>();
    for (int64_t i = 0, first = 0; i < given.grads.n; i++) {
        items[i] = given.item(i, first);
        first += (items[i].n + PIECE - 1) / PIECE;
    }
    double* const partial = given.partial.as<double>();
    MC_FOR_FLOAT(given.grads.dtype, G,
        each_piece(items, given.pieces, PIECE, [=](int64_t piece, const Item& item, int64_t begin, int64_t end) {
            partial[piece] = squares(static_cast<const G*>(item.g) + begin, end - begin);
        }))
    double sum = 0;
    for (int64_t i = 0; i < given.pieces; i++) sum += partial[i];
    *given.total.as<double>() = sum;
}

MC_KERNEL(adamw_clip) {
    const ClipArguments a(call);
    call.ready();
    verdict(a.clip.as<float>(), a.totals.as<double>(), a.totals.shape.count(), a.scale.as<float>(), a.max_norm);
}

MC_KERNEL(adamw) {
    const Arguments given(call, F32 | BF16 | I8);
    call.ready();
    const float factor = given.clip.as<float>()[1];
    if (factor != factor) return;
    const Numbers c = given.numbers;
    Item* const items = given.table.as<Item>();
    for (int64_t i = 0, first = 0; i < given.p.n; i++) {
        items[i] = given.item(i, first);
        first += (items[i].n + CHUNK - 1) / CHUNK;
        tick(items[i], c, i);
    }
    const bool half = given.copy.n && given.copy.dtype == F16;
    const auto run = [&](auto update_one) {
        each_piece(items, given.chunks, CHUNK, [=](int64_t, const Item& item, int64_t begin, int64_t end) {
            update_one(item, begin, end, factor, c, half);
        });
    };
    const auto rounded = [&](auto plain, auto stochastic) { c.stochastic ? run(stochastic) : run(plain); };
    MC_FOR_FLOAT(given.g.dtype, G, MC_FOR_BOOL(given.p.dtype == F32, WIDE,
        using P = typename std::conditional<WIDE || std::is_same<G, fp16>::value, float, bf16>::type;  // bf16 has no fp16 gradient
        if (given.m.dtype == I8) rounded(update_coded<P, G, false>, update_coded<P, G, true>);
        else if (given.m.dtype == BF16) rounded(update_some<P, G, bf16, false>, update_some<P, G, bf16, true>);
        else rounded(update_some<P, G, float, false>, update_some<P, G, float, sizeof(P) == 2>);
    ))
}
