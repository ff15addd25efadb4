// Rows of a table by number, and the gradient of the table without an atomic: the same bits every time.
//
// For the gradient tokens come sorted by row, stably (`order`), with where each row's begin (`start`). A block adds up RUN of them
// in their order; what it finds whole goes to the table, of a row that goes on before or behind it the sum goes to `partial` (two
// rows of fp32 a block: the row it began with, the row it ends with). A second kernel adds those, in a fixed order, and writes zero
// where no token is; a third has the rows of frequent words.
#include "cuda.h"
#include "embedding.h"
#include "ptx.h"

namespace {

constexpr int RUN = 32;  // ops/embedding.py

// An id that the table does not have gives NaN. Where rows are aligned, a block's PACKS of the result as it lies, so that short and long
// rows have as many bytes under way; what is read stays in the second cache and what is written does not, since a text has its words again.
constexpr int SIDE_BY_SIDE = 128, PACKS = 2 * SIDE_BY_SIDE;
__global__ __launch_bounds__(SIDE_BY_SIDE) void gather_packs(
    const int64_t* ids, const uint4* table, uint4* out, int64_t count, int64_t vocab, int64_t width, uint32_t nan) {
    const int64_t begin = int64_t{blockIdx.x} * PACKS, row = quotient(begin, width);
    const auto of_row = static_cast<uint32_t>(width), within = static_cast<uint32_t>(begin - row * width) + threadIdx.x;
    const uint4* from[2];
    uint4 found[2];
#pragma unroll
    for (int u = 0; u < 2; u++) {
        const uint32_t place = within + u * SIDE_BY_SIDE, further = place / of_row;
        const int64_t id = begin + threadIdx.x + u * SIDE_BY_SIDE < count ? ids[row + further] : -1;
        from[u] = id >= 0 && id < vocab ? table + id * width + (place - further * of_row) : nullptr;
    }
#pragma unroll
    for (int u = 0; u < 2; u++) found[u] = from[u] ? read_passing(from[u]) : make_uint4(nan, nan, nan, nan);
#pragma unroll
    for (int u = 0; u < 2; u++) {
        const int64_t at = begin + threadIdx.x + u * SIDE_BY_SIDE;
        if (at < count) __stcs(out + at, found[u]);
    }
}

// Other rows, a warp a token, numbers side by side.
template <class T>
__global__ __launch_bounds__(256) void gather(const int64_t* ids, const T* table, T* out, int64_t n, int64_t vocab, int64_t dim) {
    if (!present<T>) return;
    const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (token >= n) return;
    const int64_t id = ids[token];
    const bool known = id >= 0 && id < vocab;
    const T* from = table + (known ? id : 0) * dim;
    T* const to = out + token * dim;
    const int64_t there = known ? dim : 0;
    constexpr int AHEAD = 8;  // numbers read before the first is written
    for (int64_t column = threadIdx.x; column < dim; column += 32 * AHEAD) {
        T some[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            const int64_t at = column + u * 32;
            some[u] = at < there ? from[at] : from_float<T>(__int_as_float(0x7FC00000));
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
            if (column + u * 32 < dim) to[column + u * 32] = some[u];
    }
}

struct Plain {
    float sum = 0.0f;
    __device__ __forceinline__ void add(float x) { sum += x; }
    __device__ __forceinline__ float whole() const { return sum; }
};
template <class T>
using Sum = std::conditional_t<sizeof(T) == 4, Total, Plain>;  // 16 bits show nothing of what sums round off

template <class T, bool VECTOR>
__device__ __forceinline__ void put(T* to, const Sum<T> (&sums)[SPAN<T>], int count) {
    Pack<T, SPAN<T>> pack;
#pragma unroll
    for (int i = 0; i < SPAN<T>; i++) pack.at[i] = from_float<T>(sums[i].whole());
    store<VECTOR>(to, pack, count);
}

template <class T, bool VECTOR>
__global__ __launch_bounds__(128) void add_runs(
    const int32_t* ids, const int64_t* order, const T* grad, int64_t pad, float* partial, T* dtable, int64_t n, int64_t vocab, int64_t dim) {
    if (!present<T>) return;
    constexpr int EACH = SPAN<T>;  // columns of a thread
    const int64_t column = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * EACH, first = int64_t{blockIdx.x} * RUN;
    if (column >= dim) return;
    const int count = some<EACH, VECTOR>(column, dim);
    const int64_t last = first + RUN < n ? first + RUN : n;
    Sum<T> sums[EACH];
    bool whole = first == 0 || ids[first - 1] != ids[first];  // the run of equal ids began in this block
    constexpr int AHEAD = sizeof(T) == 4 ? 8 : 4;  // tokens that are read before the first is added
    for (int64_t at = first; at < last; at += AHEAD) {
        Pack<T, EACH> given[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
            if (at + u < last) given[u] = load<VECTOR, EACH>(grad + order[at + u] * dim + column, count);
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (at + u >= last) break;
            const int32_t id = ids[at + u];
#pragma unroll
            for (int i = 0; i < EACH; i++) sums[i].add(to_float(given[u].at[i]));
            const bool ends = at + u + 1 == n || ids[at + u + 1] != id;
            if (!ends && at + u + 1 < last) continue;
            if (whole && ends) {
                if (id >= 0 && id < vocab && id != pad) put<T, VECTOR>(dtable + int64_t{id} * dim + column, sums, count);
            } else {
                Pack<float, EACH> part;
#pragma unroll
                for (int i = 0; i < EACH; i++) part.at[i] = sums[i].whole();
                store<VECTOR>(partial + (2 * int64_t{blockIdx.x} + whole) * dim + column, part, count);
            }
            whole = true;
#pragma unroll
            for (int i = 0; i < EACH; i++) sums[i] = {};
        }
    }
}

constexpr int TEAM = 8;  // warps of a block

// Adds up, for a thread's columns, the sums of a row's tokens in the blocks from `block` on, `step` apart.
template <bool VECTOR, int EACH, class S>
__device__ __forceinline__ void add(S (&sums)[EACH], const float* partial, int64_t first, int64_t last, int64_t block, int step,
                                    int64_t dim, int64_t column, int count) {
#pragma unroll 4
    for (; block <= last; block += step) {
        const auto from = load<VECTOR, EACH>(partial + (2 * block + (block == first)) * dim + column, count);
#pragma unroll
        for (int i = 0; i < EACH; i++) sums[i].add(from.at[i]);
    }
}

// The blocks in which the tokens of a row are; the last is before the first where there is none.
struct Blocks {
    int64_t first, last;
    __device__ __forceinline__ Blocks(const int64_t* start, int64_t row, int64_t pad) {
        const int64_t begin = start[row], end = row == pad ? begin : start[row + 1];
        first = begin / RUN, last = begin < end ? (end - 1) / RUN : first - 1;
    }
    __device__ __forceinline__ bool many() const { return last - first >= TEAM; }
};

// Rows of the table without a token, and those whose tokens are in several blocks, a warp each.
template <class T, bool VECTOR>
__global__ __launch_bounds__(32 * TEAM) void finish(const int64_t* start, int64_t pad, const float* partial, T* dtable, int64_t vocab, int64_t dim) {
    if (!present<T>) return;
    constexpr int EACH = SPAN<T>, SIDE = 32 * EACH;  // columns of a thread, of a warp
    for (int64_t row = int64_t{blockIdx.x} * TEAM + threadIdx.y; row < vocab; row += int64_t{gridDim.x} * TEAM) {
        const Blocks in(start, row, pad);
        if (in.last == in.first || in.many()) continue;
        for (int64_t column = threadIdx.x * EACH; column < dim; column += SIDE) {
            const int count = some<EACH, VECTOR>(column, dim);
            Sum<T> sums[EACH];
            add<VECTOR>(sums, partial, in.first, in.last, in.first, 1, dim, column, count);
            put<T, VECTOR>(dtable + row * dim + column, sums, count);
        }
    }
}

// Rows whose tokens are in many, as those of the most frequent words are: all warps of a block for some columns of a row, which is that
// of the token with which every TEAM-th block of those begins, the first such of a row counting.
template <class T, bool VECTOR>
__global__ __launch_bounds__(32 * TEAM) void finish_frequent(
    const int32_t* ids, const int64_t* start, int64_t pad, const float* partial, T* dtable, int64_t vocab, int64_t dim) {
    if (!present<T>) return;
    constexpr int EACH = SPAN<T>, SIDE = 32 * EACH;
    __shared__ float said[TEAM][SIDE];
    const int64_t block = (int64_t{blockIdx.x} + 1) * TEAM, row = ids[block * RUN];
    if (row < 0 || row >= vocab) return;
    const Blocks in(start, row, pad);
    if (!in.many() || block != (in.first / TEAM + 1) * TEAM) return;
    const int64_t column = int64_t{blockIdx.y} * SIDE + threadIdx.x * EACH;
    const int count = some<EACH, VECTOR>(column, dim);
    Sum<T> sums[EACH];
    if (count) add<VECTOR>(sums, partial, in.first, in.last, in.first + threadIdx.y, TEAM, dim, column, count);
#pragma unroll
    for (int i = 0; i < EACH; i++) said[threadIdx.y][threadIdx.x * EACH + i] = sums[i].whole();
    __syncthreads();
    if (threadIdx.y || !count) return;
    for (int y = 1; y < TEAM; y++)
#pragma unroll
        for (int i = 0; i < EACH; i++) sums[i].add(said[y][threadIdx.x * EACH + i]);
    put<T, VECTOR>(dtable + row * dim + column, sums, count);
}

const dim3 WARPS(32, TEAM);

}  // namespace

MC_KERNEL(embedding) {
    const Embedding a(call);
    check_present(call, a.table.dtype);
    if (!a.n || !a.dim) return;
    const auto stream = static_cast<cudaStream_t>(call.stream);
    const int64_t width = a.bytes / 16, packs = a.n * width;
    if (a.table.aligned() && a.out.aligned() && a.dim % 8 == 0 && width < INT32_MAX) {
        const uint32_t nan = a.table.dtype == F32 ? 0x7FC00000u : a.table.dtype == BF16 ? 0x7FC07FC0u : 0x7E007E00u;
        gather_packs<<<static_cast<unsigned>((packs + PACKS - 1) / PACKS), SIDE_BY_SIDE, 0, stream>>>(
            a.ids.as<int64_t>(), a.table.as<uint4>(), a.out.as<uint4>(), packs, a.vocab, width, nan);
        return;
    }
    const auto blocks = static_cast<unsigned>((a.n + TEAM - 1) / TEAM);
    MC_FOR_FLOAT(a.table.dtype, T,
        gather<T><<<blocks, WARPS, 0, stream>>>(a.ids.as<int64_t>(), a.table.as<T>(), a.out.as<T>(), a.n, a.vocab, a.dim))
}

MC_KERNEL(embedding_backward) {
    const Array ids = call.in("ids", I32);
    const int64_t n = ids.shape.count();
    const Array order = call.in("order", I64, Shape{n});
    const Array start = call.in("start", I64);
    const int64_t vocab = start.shape.count() - 1;
    const Array grad = call.in("grad", FLOATS);
    if (grad.shape.rank != 2 || grad.shape.at[0] != n) call.refuse("grad: wanted a row for each of %lld ids", static_cast<long long>(n));
    const int64_t dim = grad.shape.at[1], pad = call.integer("pad", -1);
    const Array partial = call.inout("partial", F32, Shape{2 * ((n + RUN - 1) / RUN), dim});
    const Array dtable = call.out("dtable", grad.dtype, Shape{vocab, dim});
    call.ready();
    check_present(call, grad.dtype);
    if (!dim || !vocab) return;
    const bool vector = grad.aligned() && dtable.aligned() && partial.aligned() && dim % 8 == 0;
    const auto stream = static_cast<cudaStream_t>(call.stream);
    const int64_t wide = 128 * 16 / (grad.dtype == F32 ? 4 : 2);  // columns of a block
    const dim3 runs(static_cast<unsigned>((n + RUN - 1) / RUN), static_cast<unsigned>((dim + wide - 1) / wide));
    MC_FOR_FLOAT(grad.dtype, T, MC_FOR_BOOL(vector, VECTOR, {
        if (n)
            add_runs<T, VECTOR><<<runs, 128, 0, stream>>>(
                ids.as<int32_t>(), order.as<int64_t>(), grad.as<T>(), pad, partial.as<float>(), dtable.as<T>(), n, vocab, dim);
        finish<T, VECTOR><<<grid(vocab, TEAM, 64), WARPS, 0, stream>>>(
            start.as<int64_t>(), pad, partial.as<float>(), dtable.as<T>(), vocab, dim);
        const int64_t frequent = n ? (n - 1) / RUN / TEAM : 0, strips = (dim + 32 * SPAN<T> - 1) / (32 * SPAN<T>);
        if (frequent)
            finish_frequent<T, VECTOR><<<dim3(static_cast<unsigned>(frequent), static_cast<unsigned>(strips)), WARPS, 0, stream>>>(
                ids.as<int32_t>(), start.as<int64_t>(), pad, partial.as<float>(), dtable.as<T>(), vocab, dim);
    }))
}
