// The gradients of LayerNorm and RMSNorm: norm.h has the formulas, norm_ring.h how rows are walked over.
//
// The blocks write their sums for weight and bias to lines of `partial`, which a second kernel adds up in a fixed order. Arithmetic is
// in fp32; in half precision a difference from the mean may be rounded as one product, of which their own steps show nothing.
//
// In fp32 a gradient times its weight is rounded together with what is taken off it, and that times rstd together with what is added
// to it: the whole number twice, where a step at a time would be four times and compiled code does it three times. What is taken off
// in RMSNorm is rounded before that: it is small, but where a gradient is nearly a multiple of its row. In LayerNorm the mean of the
// gradient goes first, for it may be as large as the gradient, and its sum with something else would be rounded as coarsely.
//
// Bytes an element must move in bf16: 6, and 2 more with a residual or with a second gradient.
#include "norm_ring.h"

namespace {

// Whether a kernel may be given a second gradient, in the residual's place. Others lack registers for one, and for both there is no
// room: then norm_any_rows_backward does it.
template <int D, int TOTAL, bool SHIFT>
constexpr bool TWO = !SHIFT && D == TOTAL && D != ANY;

// D: the dtype of the norm's gradient and of the branch's; TOTAL: of what was normalised and of its gradient. JOINT: all groups of a
// block go together, and need not be whole warps.
template <int D, int TOTAL, bool CENTRED, bool SHIFT, bool JOINT, int PACKS, int ROWS>
__global__ void __launch_bounds__(threads_of(PACKS)) norm_rows_backward(const Problem p) {
    if (D == BF16 && !present<bf16>) return;
    constexpr int SUMS = CENTRED ? 2 : 1;
    constexpr bool HALF = TOTAL == BF16 || TOTAL == F16;
    constexpr int GAP = gap<TOTAL, SHIFT>;
    extern __shared__ uint4 memory[];
    __shared__ Board<ROWS, true> board;
    const int dim = static_cast<int>(p.dim);
    const int64_t group = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const int skew = SHIFT ? p.total.skew(group * dim) : 0;
    const bool adds = p.residual.data, two = TWO<D, TOTAL, SHIFT> && p.also.data;
    const Source<D, SHIFT, PACKS, GAP> grad(p.x, p.rows * p.dim, group * dim, skew);
    const Source<TOTAL, SHIFT, PACKS, GAP> normed(p.normed, p.rows * p.dim, group * dim, skew);
    const Source<TOTAL, SHIFT, PACKS, GAP> other(two ? p.also : adds ? p.residual : p.x, p.rows * p.dim, group * dim, skew);
    const int after = grad.slots(), last = after + normed.slots(), slots = last + (adds || two ? other.slots() : 0);
    Ring<PACKS> ring{memory};
    ring.base += threadIdx.y * ring.packs() * p.stages * ROWS * slots;
    for (int i = 0; i < p.stages * ROWS; i++) {
        grad.clear(ring, i * slots, dim);
        normed.clear(ring, i * slots + after, dim);
        if (adds || two) other.clear(ring, i * slots + last, dim);
    }
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    const float share = 1.0f / static_cast<float>(dim), scale = p.seed ? p.scale : 1.0f;
    Window<SHIFT, GAP> mine[PACKS];
    Eight w[PACKS], dw[PACKS] = {}, db[PACKS] = {};
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        mine[j].set(column_of<GAP>(ring.pack(j)) - skew, dim);
        w[j] = mine[j].read(p.weight);
    }
    int turn = 0;
    // lane l, or of eight lanes the l-th where groups share a warp, has statistic l / ROWS of row l % ROWS
    constexpr int KNOWN = (!CENTRED ? 1 : JOINT ? 2 : 3) * ROWS;  // halves need two
    static_assert(!JOINT || (HALF && KNOWN <= 8));
    const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x), place = JOINT ? thread % 8 : lane();
    const int here = static_cast<int>(blockDim.x * blockDim.y) - thread / 32 * 32;  // lanes of this warp
    const uint32_t lanes = JOINT && here < 32 ? (1u << here) - 1 : 0xFFFFFFFFu;
    const auto from = [&](float x, int which) { return JOINT ? from_eight(x, which, lanes) : from_lane(x, which); };
    const auto read_stats = [&](int64_t row) {
        const int64_t mine = row + place % ROWS * p.groups;
        return place < KNOWN && mine < p.rows ? p.stats[place / ROWS * p.rows + mine] : 0.0f;
    };
    const auto stats = [&](float held, int r) {
        const float rstd = from(held, (CENTRED ? ROWS : 0) + r);
        return CENTRED ? Stats{from(held, r), rstd, HALF ? 0.0f : from(held, 2 * ROWS + r)} : Stats{0.0f, rstd, 0.0f};
    };
    // What the halves' own steps leave hides how a difference from the mean is rounded.
    const auto normal = [](const Stats& s, float x) {
        return !CENTRED ? x * s.rstd : HALF ? fmaf(x, s.rstd, -s.mean * s.rstd) : s.normal(x);
    };
    const auto given = [&](int slot, int j, uint32_t valid) {
        Eight g = grad.get(ring, slot, j, valid);
        if (!two) return g;
        const Eight second = other.get(ring, slot + last, j, valid);
#pragma unroll
        for (int k = 0; k < 8; k++) g.at[k] += second.at[k];
        return g;
    };
    const int64_t apart = p.groups * p.dim;
    float next = read_stats(group);
    if (SHIFT) group_barrier<true>();
    walk<ROWS, SHIFT, (PACKS > FEW_PACKS)>(
        p, group, slots,
        [&](int64_t at, int slot, bool exists) {
            grad.copy(ring, slot, at, dim, exists);
            normed.copy(ring, slot + after, at, dim, exists);
            if (adds || two) other.copy(ring, slot + last, at, dim, exists);
        },
        [&](int64_t row, int64_t start, int slot) {
            const float held = next;
            next = read_stats(row + ROWS * p.groups);
            float sums[SUMS * ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const Stats s = stats(held, r);
                float level = 0.0f, skewed = 0.0f;
#pragma unroll
                for (int j = 0; j < PACKS; j++) {
                    const Eight g = given(slot + r * slots, j, mine[j].valid);
                    const Eight v = normed.get(ring, slot + r * slots + after, j, mine[j].valid);
#pragma unroll
                    for (int k = 0; k < 8; k++) {  // no column, no row: a gradient of zero
                        const float h = normal(s, v.at[k]), weighted = g.at[k] * w[j].at[k];
                        dw[j].at[k] = fmaf(g.at[k], h, dw[j].at[k]);
                        if (CENTRED) db[j].at[k] += g.at[k], level += weighted;
                        skewed = fmaf(weighted, h, skewed);
                    }
                }
                sums[r] = skewed;
                if (CENTRED) sums[(SUMS - 1) * ROWS + r] = level;
            }
            float found;
            if constexpr (JOINT) found = joint_sums(sums, board, turn, lanes) * share;
            else found = group_sums(sums, board, turn) * share;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int64_t at = start + r * apart;
                const Stats s = stats(held, r);
                const float skewed = from(found, r), level = CENTRED ? from(found, (SUMS - 1) * ROWS + r) : 0.0f;
                const float slope = s.rstd * s.rstd * skewed, offset = s.rstd * (s.mean * s.rstd * skewed - level);
                const float tilt = s.rstd * skewed;
                if (!(ROWS == 1 && PACKS > FEW_PACKS) && row + r * p.groups >= p.rows) continue;
#pragma unroll
                for (int j = 0; j < PACKS; j++) {
                    Eight d = given(slot + r * slots, j, mine[j].valid);  // again, rather than in registers meanwhile
                    const Eight v = normed.get(ring, slot + r * slots + after, j, mine[j].valid);
#pragma unroll
                    for (int k = 0; k < 8; k++)
                        d.at[k] = HALF ? fmaf(d.at[k] * w[j].at[k], s.rstd, fmaf(-v.at[k], slope, offset))
                                  : CENTRED ? fmaf(-normal(s, v.at[k]), skewed, fmaf(d.at[k], w[j].at[k], -level))
                                            : fmaf(d.at[k], w[j].at[k], -(v.at[k] * tilt));
                    if (adds) {
                        const Eight more = other.get(ring, slot + r * slots + last, j, mine[j].valid);
#pragma unroll
                        for (int k = 0; k < 8; k++) d.at[k] = HALF ? d.at[k] + more.at[k] : fmaf(d.at[k], s.rstd, more.at[k]);
                    } else if (!HALF) {
#pragma unroll
                        for (int k = 0; k < 8; k++) d.at[k] *= s.rstd;
                    }
                    mine[j].template store<TOTAL>(p.total, at, d);
                    if (!p.out.data) continue;
                    const int64_t e = at + mine[j].first;
                    const uint32_t keep = !p.seed ? 0xFFu : SHIFT ? kept8(e, key, p.threshold) : kept_fours<GAP>(e, key, p.threshold);
#pragma unroll
                    for (int k = 0; k < 8; k++) d.at[k] = keep >> k & 1 ? d.at[k] * scale : 0.0f;
                    mine[j].template store<D>(p.out, at, d);
                }
            }
        });
    // the sums of the block's groups, in their order, by way of the memory that rows have left
    auto* found = reinterpret_cast<float*>(memory);
    const int width = SUMS * dim;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        mine[j].write(found + threadIdx.y * width, dw[j]);
        if (CENTRED) mine[j].write(found + threadIdx.y * width + dim, db[j]);
    }
    __syncthreads();
    for (int c = thread; c < width; c += static_cast<int>(blockDim.x * blockDim.y)) {
        Total total;
        for (int i = 0; i < static_cast<int>(blockDim.y); i++) total.add(found[i * width + c]);
        p.partial[int64_t{blockIdx.x} * width + c] = total.whole();
    }
}

// The gradient of the norm for N columns from element `at` on.
template <int N>
__device__ __forceinline__ Few<N> given(const Problem& p, int64_t at) {
    Few<N> g = few<N>(p.x, at);
    if (!p.also.data) return g;
    const Few<N> second = few<N>(p.also, at);
#pragma unroll
    for (int k = 0; k < N; k++) g.at[k] += second.at[k];
    return g;
}

// Rows too long for a ring, or of odd dtypes and alignments: a block each; the sums for weight and bias are another kernel's.
template <int N>
__global__ void __launch_bounds__(HALF_OF_ALL, 2) norm_any_rows_backward(const Problem p) {
    __shared__ Board<1, false> board;
    const uint64_t key = p.seed ? static_cast<uint64_t>(*p.seed) : 0;
    int turn = 0;
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const int64_t at = row * p.dim;
        const auto s = Stats::of(p, row);
        float sums[2] = {};
        columns<N>(p.dim, [&](int64_t c) {
            const Few<N> g = given<N>(p, at + c), w = few<N>(p.weight, c), x = few<N>(p.normed, at + c);
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float weighted = g.at[k] * w.at[k];
                sums[0] += weighted;
                sums[1] = fmaf(weighted, s.normal(x.at[k]), sums[1]);
            }
        });
        const float found = group_sums(sums, board, turn) / static_cast<float>(p.dim);
        const float level = p.centred ? from_lane(found, 0) : 0.0f, skewed = from_lane(found, 1), tilt = s.rstd * skewed;
        columns<N>(p.dim, [&](int64_t c) {
            const Few<N> g = given<N>(p, at + c), w = few<N>(p.weight, c), x = few<N>(p.normed, at + c);
            Few<N> more{}, d;
            if (p.residual.data) more = few<N>(p.residual, at + c);
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float slope = p.centred ? fmaf(-s.normal(x.at[k]), skewed, fmaf(g.at[k], w.at[k], -level))
                                              : fmaf(g.at[k], w.at[k], -(x.at[k] * tilt));
                d.at[k] = fmaf(slope, s.rstd, more.at[k]);
            }
            put(p.total, at + c, d);
            if (!p.out.data) return;
            const uint32_t keep = p.seed ? kept_few<N>(at + c, key, p.threshold) : 0xFFu;
#pragma unroll
            for (int k = 0; k < N; k++) d.at[k] = keep >> k & 1 ? d.at[k] * (p.seed ? p.scale : 1.0f) : 0.0f;
            put(p.out, at + c, d);
        });
    }
}

// partial[y]: sums over the rows y, y + gridDim.y ..., for 32 times N columns a block
template <int N>
__global__ void __launch_bounds__(256) norm_columns(const Problem p) {
    __shared__ float weights[8][32 * N + 1], biases[8][32 * N + 1];
    const int64_t first = int64_t{blockIdx.x} * 32 * N, c = first + threadIdx.x * N, step = int64_t{gridDim.y} * blockDim.y;
    Few<N> dw{}, db{};
    if (c < p.dim)
        for (int64_t row = int64_t{blockIdx.y} + int64_t{gridDim.y} * threadIdx.y; row < p.rows; row += step) {
            const auto s = Stats::of(p, row);
            const Few<N> g = given<N>(p, row * p.dim + c), x = few<N>(p.normed, row * p.dim + c);
#pragma unroll
            for (int k = 0; k < N; k++) dw.at[k] = fmaf(g.at[k], s.normal(x.at[k]), dw.at[k]), db.at[k] += g.at[k];
        }
#pragma unroll
    for (int k = 0; k < N; k++)
        weights[threadIdx.y][threadIdx.x * N + k] = dw.at[k], biases[threadIdx.y][threadIdx.x * N + k] = db.at[k];
    __syncthreads();
    float* line = p.partial + int64_t{blockIdx.y} * (p.centred ? 2 : 1) * p.dim;
    for (auto i = static_cast<int>(threadIdx.y * 32 + threadIdx.x); i < 32 * N && first + i < p.dim; i += 256) {
        float weight = 0.0f, bias = 0.0f;
        for (int y = 0; y < 8; y++) weight += weights[y][i], bias += biases[y][i];
        line[first + i] = weight;
        if (p.centred) line[p.dim + first + i] = bias;
    }
}

// The sums of the lines of `partial`: the gradients of the weight (dim), and behind them those of the bias.
template <class W>
__global__ void __launch_bounds__(512) norm_add_partial(const float* partial, int64_t lines, int64_t dim, int64_t width, W* dweight,
                                                       W* dbias) {
    add_lines(partial, lines, width, int64_t{blockIdx.x} * 32,
              [=](int64_t c, float sum) { (c < dim ? dweight[c] : dbias[c - dim]) = from_float<W>(sum); });
}

template <int D, int TOTAL, bool CENTRED, bool SHIFT, bool JOINT, int PACKS, int ROWS>
bool ring(const Problem& p, int slots, int64_t& lines, cudaStream_t stream) {
    return launch<norm_rows_backward<D, TOTAL, CENTRED, SHIFT, JOINT, PACKS, ROWS>>(PACKS, ROWS, p, SHIFT, JOINT, slots, lines, stream);
}

bool launch_backward(const Problem& p, bool shift, int slots, int64_t& lines, cudaStream_t stream) {
    const Dtype dtype = p.x.dtype, total = p.normed.dtype;
    const bool alike = !p.out.data || p.out.dtype == dtype, same = alike && total == dtype, known = same || (alike && total == F32);
    if (p.also.data && (shift || !same || p.residual.data)) return false;
    MC_FOR_BOOL(p.centred, CENTRED,
        const auto halves = [&](auto d) {
            constexpr int D = d.value;
            if (shift) return same && ring<D, D, CENTRED, true, false, 1, 4>(p, slots, lines, stream);
            if (!same)
                return ring<D, F32, CENTRED, false, false, 1, 1>(p, slots, lines, stream) ||
                       ring<D, F32, CENTRED, false, false, 2, 1>(p, slots, lines, stream);
            // Of three arrays rows come two at a time, in stages of which then four fit and not two: up to 10 % faster, of two arrays slower.
            const bool two = slots > 2;
            return (two && ring<D, D, CENTRED, false, true, 1, 2>(p, slots, lines, stream)) ||
                   (!two && ring<D, D, CENTRED, false, true, 1, 4>(p, slots, lines, stream)) ||
                   (!two && ring<D, D, CENTRED, false, false, 1, 4>(p, slots, lines, stream)) ||
                   ring<D, D, CENTRED, false, false, 1, 2>(p, slots, lines, stream) ||
                   ring<D, D, CENTRED, false, false, 2, 1>(p, slots, lines, stream) ||
                   ring<D, D, CENTRED, false, false, 3, 1>(p, slots, lines, stream) ||
                   ring<D, D, CENTRED, false, false, 4, 1>(p, slots, lines, stream);
        };
        if (dtype == BF16 && known && halves(std::integral_constant<int, BF16>{})) return true;
        if (dtype == F16 && known && halves(std::integral_constant<int, F16>{})) return true;
        if (shift) return false;
        if (dtype == F32 && same && ring<F32, F32, CENTRED, false, false, 1, 1>(p, slots, lines, stream)) return true;
        return !p.also.data && ring<ANY, ANY, CENTRED, false, false, 2, 1>(p, slots, lines, stream);)
}

// How many lines of `partial` there are.
int64_t backward(const Problem& p, int64_t lines, bool shift, bool whole, cudaStream_t stream) {
    const int slots = slots_of(p.x) + slots_of(p.also) + slots_of(p.normed) + slots_of(p.residual);
    if (p.alike && launch_backward(p, shift, slots, lines, stream)) return lines;
    const auto run = [&](auto n) {
        constexpr int N = n.value;
        const int threads = threads_for(p.dim, N);
        norm_any_rows_backward<N><<<grid(p.rows, 1, 4096 / threads), threads, 0, stream>>>(p);
        const dim3 blocks(static_cast<unsigned>((p.dim + 32 * N - 1) / (32 * N)), static_cast<unsigned>(lines));
        norm_columns<N><<<blocks, dim3(32, 8), 0, stream>>>(p);
    };
    if (whole) run(std::integral_constant<int, 8>{});
    else run(std::integral_constant<int, 1>{});
    return lines;
}

}  // namespace

MC_KERNEL(norm_backward) {
    const Backward a(call, FLOATS);
    if (!known(a.branch ? a.branch.dtype : a.total.dtype, a.total.dtype, a.grad.dtype))
        call.refuse("no kernel for this mixture of dtypes");
    call.ready();
    check_present(call, a.grad.dtype);
    if (!a.dim) return;
    Problem p{};
    p.x = tensor(a.grad), p.also = tensor(a.also), p.normed = tensor(a.total), p.residual = tensor(a.more), p.weight = tensor(a.weight);
    p.total = tensor(a.stream), p.out = tensor(a.branch), p.stats = a.stats.as<float>(), p.partial = a.partial.as<float>();
    p.centred = static_cast<bool>(a.dbias), p.alike = alike(a.stream, a.branch), p.rows = a.rows, p.dim = a.dim;
    set_rate(p, a.seed, a.rate);
    const auto on = static_cast<cudaStream_t>(call.stream);
    const bool shift = !packed(p.dim, a.grad, a.also, a.total, a.more, a.stream, a.branch);
    const int64_t used = p.rows ? backward(p, a.lines, shift, !shift && a.weight.aligned(), on) : 0;
    MC_FOR_FLOAT(a.weight.dtype, W, norm_add_partial<W><<<static_cast<unsigned>((a.width + 31) / 32), dim3(32, 16), 0, on>>>(
        p.partial, used, p.dim, a.width, a.dweight.as<W>(), a.dbias.as<W>()))
}
