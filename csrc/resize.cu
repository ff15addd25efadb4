// Rows of another length (resize.h), as fast as the same bytes are copied: a thread writes 16 of them at a time, whatever rows these are
// of, and reads them by the two aligned packs that they lie in.
#include "cuda.h"
#include "resize.h"

namespace {

constexpr int THREADS = 128, PACKS = 2;  // of a thread, which are under way together

// T: a number of as many bytes as an element has. `there`: rows of y that x has. `n`: elements of y.
template <class T>
__global__ __launch_bounds__(THREADS) void resize(const T* __restrict__ x, T* __restrict__ y, int64_t there, int64_t width, int64_t n,
                                                  int64_t cols) {
    constexpr int EACH = SPAN<T>;
    const T* const end = x + there * width;
    uint4 read[PACKS][2];
    int shift[PACKS];  // elements of the first pack that are not wanted; below 0: one by one
    int64_t from[PACKS];
#pragma unroll
    for (int u = 0; u < PACKS; u++) {
        const int64_t at = (blockIdx.x * int64_t{PACKS * THREADS} + u * THREADS + threadIdx.x) * EACH;
        const int64_t row = quotient(at, cols), col = at - row * cols;
        const T* first = x + row * width + col;
        shift[u] = static_cast<int>(reinterpret_cast<uintptr_t>(first) % 16 / sizeof(T));
        first -= shift[u];
        const bool ends = first >= x && first + (shift[u] ? 2 : 1) * EACH <= end;  // of a row that is there
        if (row >= there || col + EACH > cols || col + EACH > width || !ends) shift[u] = -1;
        from[u] = at;
        if (shift[u] >= 0) {
            const auto* packs = reinterpret_cast<const uint4*>(first);
            read[u][0] = packs[0];
            if (shift[u]) read[u][1] = packs[1];
        }
    }
#pragma unroll
    for (int u = 0; u < PACKS; u++) {
        const int64_t at = from[u];
        if (shift[u] >= 0) {
            uint32_t words[8] = {read[u][0].x, read[u][0].y, read[u][0].z, read[u][0].w,
                                 read[u][1].x, read[u][1].y, read[u][1].z, read[u][1].w};
            behind<sizeof(T)>(words, shift[u]);
            __stcs(reinterpret_cast<uint4*>(y + at), make_uint4(words[0], words[1], words[2], words[3]));
            continue;
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {  // where a row ends or is not there
            if (at + i >= n) break;
            const int64_t row = quotient(at + i, cols), col = at + i - row * cols;
            y[at + i] = row < there && col < width ? x[row * width + col] : T(0);
        }
    }
}

}  // namespace

MC_KERNEL(resize) {
    const Resize a(call);
    if (!a.y.aligned()) call.refuse("y: wanted at a multiple of 16 bytes");
    const int64_t n = a.y.shape.count(), packs = (n * a.size() + 15) / 16, blocks = (packs + PACKS * THREADS - 1) / (PACKS * THREADS);
    if (!n) return;
    if (blocks > INT32_MAX) call.refuse("more than 8 terabytes");
    const auto run = [&](auto element) {
        using T = decltype(element);
        resize<T><<<static_cast<unsigned>(blocks), THREADS, 0, static_cast<cudaStream_t>(call.stream)>>>(
            a.x.as<T>(), a.y.as<T>(), a.x.shape.at[0] < a.rows ? a.x.shape.at[0] : a.rows, a.x.shape.at[1], n, a.cols);
    };
    if (a.size() == 1) run(uint8_t{});
    else if (a.size() == 2) run(uint16_t{});
    else run(uint32_t{});
}
