// Rows of a table by number, and the gradient of the table: every row is written once, as the sum of what its tokens bring, in the
// order of the tokens and in fp32, or as zero. So threads, which share out the rows of the table, change nothing.
#include "embedding.h"
#include "simd.h"

namespace {

constexpr int64_t GRAIN = 1 << 15;  // elements a thread is worth waking for
constexpr int64_t PIECE = 512;      // columns at a time

void check(Call& call, int64_t id, int64_t vocab) {
    if (id < 0 || id >= vocab)
        call.refuse("id %lld; the table has %lld rows", static_cast<long long>(id), static_cast<long long>(vocab));
}

template <class T>
void rows_of(const T* grad, T* dtable, const int64_t* start, const int64_t* order, int64_t row, int64_t dim) {
    T* to = dtable + row * dim;
    const int64_t first = start[row], last = start[row + 1];
    if (last - first <= 1) {
        if (first == last)
            memset(to, 0, dim * sizeof(T));
        else
            memcpy(to, grad + order[first] * dim, dim * sizeof(T));
        return;
    }
    float sums[PIECE] __attribute__((aligned(64)));
    for (int64_t column = 0; column < dim; column += PIECE) {
        const int64_t n = dim - column < PIECE ? dim - column : PIECE;
        each(n, [&](int64_t i, int lanes) { store(sums + i, load_n(grad + order[first] * dim + column + i, lanes)); });
        for (int64_t token = first + 1; token < last; token++) {
            const T* from = grad + order[token] * dim + column;
            each(n, [&](int64_t i, int lanes) { store(sums + i, load(sums + i) + load_n(from + i, lanes)); });
        }
        each(n, [&](int64_t i, int lanes) { store_n(to + column + i, load(sums + i), lanes); });
    }
}

}  // namespace

MC_KERNEL(embedding) {
    const Embedding a(call);
    const int64_t* at = a.ids.as<int64_t>();
    for (int64_t i = 0; i < a.n; i++) check(call, at[i], a.vocab);
    char *const out = a.out.as<char>(), *const table = a.table.as<char>();
    mc::parallel(a.n, GRAIN / (a.dim + 1) + 1, [=, bytes = a.bytes](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) memcpy(out + i * bytes, table + at[i] * bytes, bytes);
    });
}

// `start` (vocab + 1) and `order` (n) are room to work in: where the tokens of a row begin in `order`, which sorts them by row.
MC_KERNEL(embedding_backward) {
    const Array ids = call.in("ids", I64);
    const int64_t n = ids.shape.count();
    const Array dtable = call.inout("dtable", FLOATS);
    if (dtable.shape.rank != 2) call.refuse("dtable: %d dimensions; wanted 2", dtable.shape.rank);
    const int64_t vocab = dtable.shape.at[0], dim = dtable.shape.at[1];
    const Array grad = call.in("grad", dtable.dtype, Shape{n, dim});
    const int64_t pad = call.integer("pad", -1);
    const Array start = call.out("start", I64, Shape{vocab + 1}), order = call.out("order", I64, Shape{n});
    call.ready();
    const int64_t* at = ids.as<int64_t>();
    int64_t *from = start.as<int64_t>(), *sorted = order.as<int64_t>();
    memset(from, 0, (vocab + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < n; i++) {
        check(call, at[i], vocab);
        from[at[i]]++;
    }
    if (pad >= 0 && pad < vocab) from[pad] = 0;
    int64_t sum = 0;
    for (int64_t row = 0; row < vocab; row++) sum += from[row], from[row] = sum;  // where the tokens of a row end
    from[vocab] = sum;
    for (int64_t i = n; i--;)
        if (at[i] != pad) sorted[--from[at[i]]] = i;  // and, when all are in place, where they begin
    MC_FOR_FLOAT(dtable.dtype, T, mc::parallel(vocab, GRAIN / (dim + 1) + 1, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) rows_of(grad.as<T>(), dtable.as<T>(), from, sorted, row, dim);
    }))
}
