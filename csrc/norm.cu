// LayerNorm and RMSNorm (norm.h has the formulas). The backward is in norm_backward.cu.
//
// A row is a group's own and stays in its registers; so many rows are under way at once that memory never waits. Weight and bias come
// from the first cache each time. Rows that are not aligned pass through shared memory (norm_ring.h); rows that are too long for either
// way are read again for each sum (norm_any_rows).
//
// Arithmetic is in fp32. Some kernels are for arrays all of one dtype; those for all else ask for the dtype of each pack.
//
// Bytes an element must move in bf16: 4, 8 with a residual.
#include "norm_ring.h"

namespace {

template <int D>
constexpr int SHARE = D == BF16 || D == F16 ? 4 : 2;  // packs of a thread: 64 bytes where all of them are of one dtype
constexpr int WIDE = 512;  // threads of a block, at most

// A thread's fours of a pack, kept as they are in memory where that is half precision.
template <int D, int GAP>
struct Held {
    Eight own;
    // the first from element `at` on; bits of `valid` say which there are. PASSING: nobody reads them again
    template <bool PASSING = false>
    __device__ __forceinline__ void load(const Tensor& from, int64_t at, uint32_t valid) {
        const char* place = static_cast<const char*>(from.data) + at * size<D>(from);
        const bool first = GAP == 4 || valid & 1, second = GAP == 4 || valid & 16;
        const uint4 none = make_uint4(0, 0, 0, 0);
        if (kind<D>(from) == F32) {
            const auto four = [](const char* p) {
                return PASSING ? read_passing(reinterpret_cast<const uint4*>(p)) : *reinterpret_cast<const uint4*>(p);
            };
            const uint4 a = first ? four(place) : none, b = second ? four(place + 4 * GAP) : none;
            own = decode({a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, F32);
        } else if (GAP == 4) {
            const uint4 a = *reinterpret_cast<const uint4*>(place);
            own = decode<4>({a.x, a.y, a.z, a.w}, kind<D>(from));
        } else {
            const uint2 a = first ? *reinterpret_cast<const uint2*>(place) : make_uint2(0, 0);
            const uint2 b = second ? *reinterpret_cast<const uint2*>(place + 2 * GAP) : make_uint2(0, 0);
            own = decode<4>({a.x, a.y, b.x, b.y}, kind<D>(from));
        }
    }
    __device__ __forceinline__ void set(const Eight& from) { own = from; }
    __device__ __forceinline__ Eight get() const { return own; }
    __device__ __forceinline__ void forget() {}
};
template <int D>
struct Halves {
    uint4 words;
    template <bool PASSING = false, bool ALONE = false>
    __device__ __forceinline__ void load(const Tensor& from, int64_t at, uint32_t) {
        const auto* place = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from.data) + at);
        words = PASSING ? read_passing<ALONE>(place) : *place;
    }
    __device__ __forceinline__ void set(const Eight& from) { words = encode(from, static_cast<Dtype>(D)); }
    __device__ __forceinline__ Eight get() const { return decode<4>({words.x, words.y, words.z, words.w}, static_cast<Dtype>(D)); }
    // The compiler would rather keep what it has decoded, in twice the registers, and then lacks some.
    __device__ __forceinline__ void forget() { asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)); }
};
template <>
struct Held<BF16, 4> : Halves<BF16> {};
template <>
struct Held<F16, 4> : Halves<F16> {};

template <bool SECOND, class A, class B>
__device__ __forceinline__ auto& either(A& first, B& second) {
    if constexpr (SECOND) return second;
    else return first;
}

// a / b without a branch, of which nvcc's division has one; `inverse`: of b, about
__device__ __forceinline__ float share(float a, float b, float inverse) {
    const float about = a * inverse, left = fmaf(-about, b, a);
    return left - left == 0.0f ? fmaf(left, inverse, about) : about;  // of an infinity nothing is left
}

// A row's mean as it is rounded, the mean of what that leaves, and that of its squares.
struct Moments {
    float mean, left, squares;
};

// Of a row, from what each warp finds of its own columns about their own mean: one barrier, where a mean and then the squares about it
// would be two. f(g) calls g(value, whether it is one of the row's) for each of a thread's columns; columns(warp): how many it has.
template <class C, class F>
__device__ __forceinline__ Moments moments(int dim, C columns, F f) {
    __shared__ float said[32][3];
    float sum = 0.0f, about[2] = {};
    f([&](float v, bool) { sum += v; });
    const float own = across<1>(sum) * quick_inverse(static_cast<float>(columns(warp())));  // any number near the mean will do
    f([&](float v, bool there) {
        const float d = there ? v - own : 0.0f;
        about[0] = fmaf(d, d, about[0]);
        about[1] += d;
    });
    const float found = warp_sums(about);
    const int first = static_cast<int>(threadIdx.y) * warps();
    if (lane() < 2) said[first + warp()][lane()] = found;
    if (lane() == 2) said[first + warp()][2] = own;
    group_barrier<false>();
    const bool there = lane() < warps();  // lane l has warp l's
    const float* mine = said[first + (there ? lane() : 0)];
    const float count = there ? static_cast<float>(columns(lane())) : 0.0f, squares = there ? mine[0] : 0.0f, left = there ? mine[1] : 0.0f;
    const float all = static_cast<float>(dim), inverse = quick_inverse(all);
    const float mean = across<1>(count * mine[2]) * inverse, apart = mine[2] - mean;
    float sums[2] = {squares + apart * (2.0f * left + count * apart), count * apart + left};
    const float whole = share(warp_sums(sums), all, inverse), rest = from_lane(whole, 1);
    return {mean, rest, from_lane(whole, 0) - rest * rest};
}

// ADDS: there may be a residual. ALONE: there is none, nor its registers, and so there are more blocks. WARP: there is none, and a row
// is a warp's, alone in its block; what passes is then kept out of the first cache, which pays there and costs elsewhere.
enum Way { ADDS, ALONE, WARP };

// Blocks of a multiprocessor, at least, as ptxas may need to be told.
template <Way WAY, int PACKS>
constexpr int BESIDE = WAY == WARP ? (PACKS > 5 ? 28 : 1) : WAY == ALONE ? 2 : 1;
// Whether a row that is added to is kept as the sum is before it is rounded, and the threads for which a kernel is made: so that it has 72
// registers, and no fewer.
template <int D, Way WAY>
constexpr bool WHOLE = WAY == ADDS && (D == BF16 || D == F16);
template <int D, Way WAY>
constexpr int MOST = WAY == WARP ? 32 : WHOLE<D, WAY> ? 896 : WIDE;

template <int D, bool CENTRED, Way WAY, int PACKS = SHARE<D>>
__global__ void __launch_bounds__(MOST<D, WAY>, BESIDE<WAY, PACKS>) norm_rows(const Problem p) {
    if (D == BF16 && !present<bf16>) return;
    constexpr int OWN = D == ANY ? F32 : D, GAP = gap<D>;
    constexpr bool HALF = D == BF16 || D == F16;
    __shared__ Board<1, false> board;
    const int dim = static_cast<int>(p.dim);
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y, at = row * p.dim;
    if (row >= p.rows) return;  // several rows a block only where each has one warp
    const auto window = [&](int j) {
        Window<false, GAP> mine;
        mine.set(column_of<GAP>(static_cast<int>(threadIdx.x + j * blockDim.x)), dim);
        return mine;
    };
    constexpr bool SUM = WHOLE<D, WAY>;
    Held<D, GAP> own[PACKS];
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        own[j].set(Eight{});
        const auto mine = window(j);
        if (!mine.valid) continue;
        if constexpr (WAY == WARP) own[j].template load<true, true>(p.x, at + mine.first, mine.valid);
        else own[j].template load<true>(p.x, at + mine.first, mine.valid);
    }
    Held<F32, GAP> whole[SUM ? PACKS : 1];  // no more registers than both have while they come
    auto& h = either<SUM>(own, whole);
    if (WAY == ADDS && p.residual.data) {
        const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
        const float scale = p.seed ? p.scale : 1.0f;
        Held<D, GAP> more[PACKS];
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const auto mine = window(j);
            if (mine.valid) more[j].template load<true>(p.residual, at + mine.first, mine.valid);
        }
        const auto kept_of = [&](int j) { return kept_fours<GAP>(at + window(j).first, key, p.threshold); };
        uint32_t all = 0xFFFFFFFFu;
        if (SUM && p.seed) {  // while the row comes
            all = 0;
#pragma unroll 1
            for (int j = 0; j < PACKS; j++) all |= kept_of(j) << 8 * j;
        }
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const auto mine = window(j);
            const uint32_t keep = SUM || !p.seed ? all >> 8 * j : kept_of(j);
            if (SUM) h[j].set(Eight{});
            if (!mine.valid) continue;
            const Eight added = more[j].get();
            Eight v = own[j].get();
#pragma unroll
            for (int k = 0; k < 8; k++) v.at[k] = (keep >> k & 1 ? v.at[k] * scale : 0.0f) + added.at[k];
            if (!SUM) v = rounded(v, kind<D>(p.total));
            h[j].set(v);
            mine.template store<D>(p.total, at, v);
        }
    }
    const auto each = [&](auto f) {
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const Eight v = h[j].get();
            const auto mine = window(j);
#pragma unroll
            for (int k = 0; k < 8; k++) f(v.at[k], mine.has(k));
            h[j].forget();
        }
    };
    Stats s{};
    float squares;
    if constexpr (CENTRED && !HALF) {
        const auto columns = [&](int warp) {
            int count = 0;
#pragma unroll
            for (int j = 0; j < PACKS; j++) count += max(min(dim - (warp * 32 + j * static_cast<int>(blockDim.x)) * 8, 256), 0);
            return count;
        };
        const Moments found = moments(dim, columns, each);
        s.mean = found.mean, s.shift = found.left, squares = found.squares;
    } else {
        float sums[CENTRED ? 2 : 1] = {};
        each([&](float v, bool) {
            sums[0] = fmaf(v, v, sums[0]);
            if (CENTRED) sums[CENTRED] += v;
        });
        int turn = 0;
        const float found = group_sums(sums, board, turn) / static_cast<float>(dim);
        squares = from_lane(found, 0);
        if (CENTRED) {
            s.mean = from_lane(found, 1);
            squares -= s.mean * s.mean;
            // one pass is good enough where the mean is small beside the spread
            if (s.mean * s.mean > 16.0f * squares) {  // about the mean as it was rounded
                float about[2] = {};
                if (SUM)  // of what may be rounded by as much as it spreads: as the backward has it
#pragma unroll
                    for (int j = 0; j < PACKS; j++) h[j].set(rounded(h[j].get(), kind<D>(p.total)));
                each([&](float v, bool there) {
                    const float d = there ? v - s.mean : 0.0f;
                    about[0] = fmaf(d, d, about[0]);
                    about[1] += d;
                });
                const float left = group_sums(about, board, turn) / static_cast<float>(dim), rest = from_lane(left, 1);
                squares = from_lane(left, 0) - rest * rest, s.mean += rest;
            }
        }
    }
    s.rstd = HALF && CENTRED ? inverse_root(squares, s.mean, p.eps) : inverse_root(squares + p.eps);
    s.shift *= -s.rstd;
    s.put<CENTRED>(p, row);
    const auto finish = [&](auto w, auto b) {
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const auto mine = window(j);
            if (!mine.valid) continue;
            w.load(p.weight, mine.first, mine.valid);
            b.set(Eight{});
            if (CENTRED && p.bias.data) b.load(p.bias, mine.first, mine.valid);
            const Eight weight = w.get(), bias = b.get();
            Eight y = h[j].get();
#pragma unroll
            for (int k = 0; k < 8; k++) y.at[k] = fmaf(s.normal(y.at[k]), weight.at[k], bias.at[k]);
            mine.template store<D>(p.out, at, y);
        }
    };
    if (D == ANY) finish(Held<ANY, GAP>{}, Held<ANY, GAP>{});
    else if (p.weight.dtype == F32) finish(Held<F32, GAP>{}, Held<F32, GAP>{});
    else finish(Held<OWN, GAP>{}, Held<OWN, GAP>{});
}

// Aligned rows in fp32 without a residual, FOURS times four columns of a thread, 128 apart. All of a row is asked for within the first
// instructions, and registers are few, so that a multiprocessor has 1536 threads or more: 1 to 7 % faster than norm_rows. SOON: the
// weight is asked for with the row, which is kept out of the first cache: half a percent of short rows' time, where all threads have eight
// columns; of others it costs 4.
template <bool CENTRED, int FOURS, bool SOON = false>
__global__ void __launch_bounds__(WIDE, FOURS == 2 && !SOON ? 4 : 3) norm_floats(const Problem p) {
    const int dim = static_cast<int>(p.dim), first = (warp() * FOURS * 32 + lane()) * 4;
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y, at = row * dim + first;
    if (row >= p.rows) return;  // several rows a block only where each has one warp
    const auto there = [&](int j) { return first + j * 128 < dim; };
    const auto four = [](const Tensor& of, int64_t at, int j) {
        return reinterpret_cast<uint4*>(static_cast<float*>(of.data) + at) + j * 32;
    };
    uint4 x[FOURS];
#pragma unroll
    for (int j = 0; j < FOURS; j++) x[j] = there(j) ? read_passing<SOON>(four(p.x, at, j)) : make_uint4(0, 0, 0, 0);
    uint4 soon[SOON ? FOURS : 1];
    if constexpr (SOON)
#pragma unroll
        for (int j = 0; j < FOURS; j++)
            soon[j] = *four(p.weight, first, j);
    const auto each = [&](auto f) {
#pragma unroll
        for (int j = 0; j < FOURS; j++)
            for (const uint32_t word : {x[j].x, x[j].y, x[j].z, x[j].w}) f(__uint_as_float(word), there(j));
    };
    Stats s{};
    float squares;
    if constexpr (CENTRED) {
        const Moments found = moments(dim, [&](int warp) { return min(dim - warp * FOURS * 128, FOURS * 128); }, each);
        s.mean = found.mean, s.shift = found.left, squares = found.squares;
    } else {
        __shared__ Board<1, false> board;
        float sums[1] = {}, all = static_cast<float>(dim);
        each([&](float v, bool) { sums[0] = fmaf(v, v, sums[0]); });
        int turn = 0;
        squares = share(group_sums(sums, board, turn), all, quick_inverse(all));
    }
    s.rstd = inverse_root(squares + p.eps);
    s.shift *= -s.rstd;
    s.put<CENTRED>(p, row);
#pragma unroll
    for (int j = 0; j < FOURS; j++) {
        if (!there(j)) continue;
        const uint4 w = SOON ? soon[SOON ? j : 0] : *four(p.weight, first, j);
        const uint4 b = CENTRED && p.bias.data ? *four(p.bias, first, j) : make_uint4(0, 0, 0, 0);
        const auto one = [&](uint32_t v, uint32_t w, uint32_t b) {
            return __float_as_uint(fmaf(s.normal(__uint_as_float(v)), __uint_as_float(w), __uint_as_float(b)));
        };
        *four(p.out, at, j) = make_uint4(one(x[j].x, w.x, b.x), one(x[j].y, w.y, b.y), one(x[j].z, w.z, b.z), one(x[j].w, w.w, b.w));
    }
}

template <int N>
__global__ void __launch_bounds__(HALF_OF_ALL, 2) norm_any_rows(const Problem p) {
    __shared__ Board<1, false> board;
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    const float scale = p.seed ? p.scale : 1.0f, all = static_cast<float>(p.dim);
    const Tensor h = p.residual.data ? p.total : p.x;
    int turn = 0;
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const int64_t at = row * p.dim;
        if (p.residual.data)
            columns<N>(p.dim, [&](int64_t c) {
                const uint32_t keep = p.seed ? kept_few<N>(at + c, key, p.threshold) : 0xFFu;
                const Few<N> x = few<N>(p.x, at + c);
                Few<N> sum = few<N>(p.residual, at + c);
#pragma unroll
                for (int k = 0; k < N; k++) sum.at[k] += keep >> k & 1 ? x.at[k] * scale : 0.0f;
                put(p.total, at + c, sum);
            });
        const auto each = [&](auto f) {  // the columns of a thread, which has written them itself
            columns<N>(p.dim, [&](int64_t c) {
                const Few<N> v = few<N>(h, at + c);
#pragma unroll
                for (int k = 0; k < N; k++) f(v.at[k]);
            });
        };
        float sum[1] = {}, about[2] = {};
        if (p.centred) each([&](float v) { sum[0] += v; });
        const float mean = p.centred ? group_sums(sum, board, turn) / all : 0.0f;
        each([&](float v) {
            about[0] = fmaf(v - mean, v - mean, about[0]);
            about[1] += v - mean;
        });
        const float found = group_sums(about, board, turn) / all;
        const float left = p.centred ? from_lane(found, 1) : 0.0f, rstd = inverse_root(from_lane(found, 0) - left * left + p.eps);
        const Stats s{mean, rstd, -left * rstd};
        if (p.centred) s.put<true>(p, row);
        else s.put<false>(p, row);
        columns<N>(p.dim, [&](int64_t c) {
            const Few<N> v = few<N>(h, at + c), w = few<N>(p.weight, c);
            Few<N> y{};
            if (p.bias.data) y = few<N>(p.bias, c);
#pragma unroll
            for (int k = 0; k < N; k++) y.at[k] = fmaf(s.normal(v.at[k]), w.at[k], y.at[k]);
            put(p.out, at + c, y);
        });
    }
}

// The forward of rows in half precision that are not aligned, through the ring.
template <int D, bool CENTRED, bool ADDS, int ROWS>
__global__ void __launch_bounds__(THREADS) norm_shifted_rows(const Problem p) {
    if (D == BF16 && !present<bf16>) return;
    constexpr bool SHIFT = true;
    constexpr int PACKS = 1;
    extern __shared__ uint4 memory[];
    __shared__ Board<ROWS, true> board;
    const int dim = static_cast<int>(p.dim);
    const int64_t group = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const int skew = p.out.skew(group * dim);
    const Source<D, SHIFT, PACKS, 4> x(p.x, p.rows * p.dim, group * dim, skew);
    const Source<D, SHIFT, PACKS, 4> residual(ADDS ? p.residual : p.x, p.rows * p.dim, group * dim, skew);
    const int after = x.slots(), slots = after + (ADDS ? residual.slots() : 0);
    Ring<PACKS> ring{memory};
    ring.base += threadIdx.y * ring.packs() * p.stages * ROWS * slots;
    for (int i = 0; i < p.stages * ROWS; i++) {
        x.clear(ring, i * slots, dim);
        if (ADDS) residual.clear(ring, i * slots + after, dim);
    }
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    const float scale = p.seed ? p.scale : 1.0f;
    Window<SHIFT, 4> mine[PACKS];
    Eight w[PACKS], b[PACKS];
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        mine[j].set(ring.pack(j) * 8 - skew, dim);
        w[j] = mine[j].read(p.weight), b[j] = mine[j].read(p.bias);
    }
    group_barrier<true>();
    const int64_t apart = p.groups * p.dim;
    int turn = 0;
    walk<ROWS, SHIFT, (PACKS > FEW_PACKS)>(
        p, group, slots,
        [&](int64_t at, int slot, bool exists) {
            x.copy(ring, slot, at, dim, exists);
            if (ADDS) residual.copy(ring, slot + after, at, dim, exists);
        },
        [&](int64_t row, int64_t start, int slot) {
            Held<ADDS ? F32 : D, 4> h[ROWS][PACKS];
            // at once, as the rows come: what is good enough in half precision where the mean is small beside the spread
            float sums[CENTRED ? 2 * ROWS : ROWS] = {};
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
#pragma unroll
                for (int j = 0; j < PACKS; j++) {
                    Eight v = x.get(ring, slot + r * slots, j, mine[j].valid);
                    if (ADDS) {
                        const int64_t at = start + r * apart;
                        const Eight more = residual.get(ring, slot + r * slots + after, j, mine[j].valid);
                        const uint32_t keep = p.seed ? kept8(at + mine[j].first, key, p.threshold) : 0xFFu;
#pragma unroll
                        for (int k = 0; k < 8; k++) v.at[k] = (keep >> k & 1 ? v.at[k] * scale : 0.0f) + more.at[k];
                        if (row + r * p.groups < p.rows) mine[j].template store<D>(p.total, at, v);
                    }
                    h[r][j].set(v);
#pragma unroll
                    for (int k = 0; k < 8; k++) {
                        sums[r] = CENTRED ? sums[r] + v.at[k] : fmaf(v.at[k], v.at[k], sums[r]);
                        if (CENTRED) sums[r + ROWS * CENTRED] = fmaf(v.at[k], v.at[k], sums[r + ROWS * CENTRED]);
                    }
                }
            }
            Stats found{};  // lane l has those of row l % ROWS
            const float means = group_sums(sums, board, turn) / static_cast<float>(dim);
            float squares = means;
            uint32_t again = 0;  // bit r: row r has a large mean
            if (CENTRED) {
                found.mean = from_lane(means, lane() % ROWS);
                squares = from_lane(means, ROWS + lane() % ROWS) - found.mean * found.mean;
                again = __ballot_sync(0xFFFFFFFFu, found.mean * found.mean > 16.0f * squares);
            }
            if (again) {  // about the mean as it was rounded, of a total as it is kept
                float about[2 * ROWS] = {};
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float mean = from_lane(found.mean, r);
#pragma unroll
                    for (int j = 0; j < PACKS; j++) {
                        const Eight v = rounded(h[r][j].get(), kind<D>(p.out));
#pragma unroll
                        for (int k = 0; k < 8; k++) {
                            const float d = mine[j].has(k) ? v.at[k] - mean : 0.0f;
                            about[r] = fmaf(d, d, about[r]);
                            about[ROWS + r] += d;
                        }
                    }
                }
                const float all = group_sums(about, board, turn) / static_cast<float>(dim);
                const float rest = from_lane(all, ROWS + lane() % ROWS), own = from_lane(all, lane() % ROWS);
                if (again >> lane() % ROWS & 1) found.mean += rest, squares = own - rest * rest;
            }
            found.rstd = CENTRED ? inverse_root(squares, found.mean, p.eps) : inverse_root(squares + p.eps);
            if (threadIdx.x < ROWS && row + threadIdx.x * p.groups < p.rows) {
                float* to = p.stats + row + threadIdx.x * p.groups;
                if (CENTRED) to[0] = found.mean, to[p.rows] = found.rstd, to[2 * p.rows] = 0.0f;
                else to[0] = found.rstd;
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                Stats s{};
                s.rstd = from_lane(found.rstd, r);
                if (CENTRED) s.mean = from_lane(found.mean, r);
                const float minus = -s.mean * s.rstd;
                if (row + r * p.groups >= p.rows) continue;
#pragma unroll
                for (int j = 0; j < PACKS; j++) {
                    Eight y = h[r][j].get();
                    const bool far = CENTRED && again >> r & 1;
                    if (ADDS && far) y = rounded(y, kind<D>(p.out));
#pragma unroll
                    for (int k = 0; k < 8; k++)
                        y.at[k] = !CENTRED ? y.at[k] * s.rstd : far ? s.normal(y.at[k]) : fmaf(y.at[k], s.rstd, minus);
#pragma unroll
                    for (int k = 0; k < 8; k++) y.at[k] = fmaf(y.at[k], w[j].at[k], b[j].at[k]);
                    mine[j].template store<D>(p.out, start + r * apart, y);
                }
            }
        });
}

bool launch_forward(const Problem& p, bool shift, int slots, cudaStream_t stream) {
    const Dtype dtype = p.residual.data ? p.residual.dtype : p.x.dtype;
    const bool same = p.x.dtype == dtype && p.out.dtype == dtype;
    if (shift) {
        int64_t lines = INT32_MAX;
        if (!p.alike || !same || dtype == F32) return false;
        MC_FOR_BOOL(p.centred, CENTRED,
            const auto run = [&](auto d, auto adds) {
                return launch<norm_shifted_rows<d.value, CENTRED, adds.value, 4>>(1, 4, p, true, false, slots, lines, stream);
            };
            const auto added = [&](auto d) { return p.residual.data ? run(d, std::true_type{}) : run(d, std::false_type{}); };
            return dtype == BF16 ? added(std::integral_constant<int, BF16>{}) : added(std::integral_constant<int, F16>{});)
    }
    const bool known = same && (p.weight.dtype == dtype || p.weight.dtype == F32), half = known && dtype != F32, adds = p.residual.data;
    const auto warps = [&](int packs) { return static_cast<int>((p.dim + 256 * packs - 1) / (256 * packs)); };  // of a row
    // A row that a warp can hold is one's: in two or three a third of their columns would be none.
    const bool floats = known && !half && !adds, single = floats && p.dim <= 4096;  // up to 1 % faster with twice the threads
    const int packs = single ? 1 : !half ? SHARE<F32> : adds || p.dim > 1792 || warps(SHARE<BF16>) == 1 ? SHARE<BF16> : warps(5) == 1 ? 5 : 7;
    const int threads = warps(packs) * 32;
    const bool alone = threads == 32 && !adds && half;
    const int together = threads == 32 && !alone ? 2 : 1;
    const int64_t blocks = (p.rows + together - 1) / together;
    if (threads > WIDE || blocks > INT32_MAX) return false;
    const dim3 block(static_cast<unsigned>(threads), together);
    const auto run = [&](auto kernel) { kernel<<<static_cast<unsigned>(blocks), block, 0, stream>>>(p); };
    MC_FOR_BOOL(p.centred, CENTRED,
        const auto halves = [&](auto d) {
            constexpr int D = d.value;
            if (adds) run(norm_rows<D, CENTRED, ADDS>);
            else if (!alone) run(norm_rows<D, CENTRED, ALONE>);
            else if (packs == 5) run(norm_rows<D, CENTRED, WARP, 5>);
            else if (packs == 7) run(norm_rows<D, CENTRED, WARP, 7>);
            else run(norm_rows<D, CENTRED, WARP>);
        };
        if (known && dtype == BF16) halves(std::integral_constant<int, BF16>{});
        else if (known && dtype == F16) halves(std::integral_constant<int, F16>{});
        else if (single && !CENTRED && p.dim <= 2048 && p.dim % 256 == 0) run(norm_floats<CENTRED, 2, !CENTRED>);
        else if (single) run(norm_floats<CENTRED, 2>);
        else if (floats) run(norm_floats<CENTRED, 4>);
        else if (known) run(norm_rows<F32, CENTRED, ADDS>);
        else run(norm_rows<ANY, CENTRED, ADDS>);)
    return true;
}

void forward(const Problem& p, bool shift, cudaStream_t stream) {
    if (launch_forward(p, shift, slots_of(p.x) + slots_of(p.residual), stream)) return;
    const auto run = [&](auto n) {
        const int threads = threads_for(p.dim, n.value);
        norm_any_rows<n.value><<<grid(p.rows, 1, 4096 / threads), threads, 0, stream>>>(p);
    };
    if (!shift) run(std::integral_constant<int, 8>{});
    else run(std::integral_constant<int, 1>{});
}

}  // namespace

MC_KERNEL(norm) {
    const Forward a(call, FLOATS);
    if (!known(a.x.dtype, a.residual ? a.residual.dtype : a.x.dtype, a.out.dtype)) call.refuse("no kernel for this mixture of dtypes");
    call.ready();
    check_present(call, a.x.dtype);
    if (!a.rows || !a.dim) return;
    Problem p{};
    p.x = tensor(a.x), p.residual = tensor(a.residual), p.weight = tensor(a.weight), p.bias = tensor(a.bias);
    p.out = tensor(a.out), p.total = tensor(a.total), p.stats = a.stats.as<float>();
    p.eps = static_cast<float>(a.eps), p.centred = a.centred, p.alike = alike(a.out, a.total), p.rows = a.rows, p.dim = a.dim;
    set_rate(p, a.seed, a.rate);
    const bool shift = !packed(p.dim, a.x, a.residual, a.out, a.total, a.weight, a.bias);
    forward(p, shift, static_cast<cudaStream_t>(call.stream));
}
