// All that a kernel file sees of the world: arrays, numbers, threads or a stream. No Python, no torch.
//
//     MC_KERNEL(relu) {                                     // becomes modelcenter._C.cpu.relu or _C.cuda.relu
//         const Array x = call.in("x", FLOATS);             // arguments are read in their order; a wrong one is an exception
//         const Array y = call.out("y", {x.dtype}, x.shape);
//         call.ready();                                     // all read, nothing written overlaps anything else: now compute
//         ...
//     }
//
// A file registers its kernels by being linked; nothing else is edited. csrc/<op>.cu is compiled once; csrc/<op>.cpp once for each
// instruction set, and the best one that the processor has is taken when the module is imported.
#pragma once
#include <cstdint>
#include <initializer_list>

namespace mc {

enum Dtype : uint32_t { F32 = 1, F16 = 2, BF16 = 4, I64 = 8, I32 = 16, U8 = 32, I8 = 64, BOOL = 128, F64 = 256 };
constexpr uint32_t FLOATS = F32 | F16 | BF16;

struct Shape {
    int rank = 0;
    int64_t at[8] = {};
    Shape() = default;
    Shape(std::initializer_list<int64_t> sizes) {
        for (int64_t size : sizes) at[rank++] = size;
    }
    int64_t last() const { return rank ? at[rank - 1] : 1; }
    int64_t count() const {  // elements
        int64_t n = 1;
        for (int i = 0; i < rank; i++) n *= at[i];
        return n;
    }
    int64_t rows() const {  // of the last axis
        int64_t n = 1;
        for (int i = 0; i + 1 < rank; i++) n *= at[i];
        return n;
    }
    bool operator==(const Shape& other) const {
        if (rank != other.rank) return false;
        for (int i = 0; i < rank; i++)
            if (at[i] != other.at[i]) return false;
        return true;
    }
};

// A contiguous tensor. `data` is null where an optional argument is None; it need not be aligned beyond its element.
struct Array {
    void* data = nullptr;
    Dtype dtype = F32;
    Shape shape;
    explicit operator bool() const { return data != nullptr || given; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data);
    }
    bool aligned(int bytes = 16) const { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }
    bool given = false;
};

// Contiguous tensors of one dtype.
struct List {
    struct Piece {
        void* data;
        int64_t count;  // elements
    };
    const Piece* at = nullptr;  // as long as the call
    int64_t n = 0;
    Dtype dtype = F32;
    const Piece& operator[](int64_t i) const { return at[i]; }
};

// The arguments of one call, read in order. Every reader checks, names the argument in its message and throws std::invalid_argument.
class Call {
public:
    // A tensor that is read; `dtypes` is a set of Dtype bits; a shape, where given, must be this one.
    Array in(const char* name, uint32_t dtypes);
    Array in(const char* name, uint32_t dtypes, const Shape& shape);
    Array maybe(const char* name, uint32_t dtypes);  // or None
    Array maybe(const char* name, uint32_t dtypes, const Shape& shape);
    // A tensor that is written, or (`inout`) read and written.
    Array out(const char* name, uint32_t dtypes, const Shape& shape);
    Array maybe_out(const char* name, uint32_t dtypes, const Shape& shape);
    Array inout(const char* name, uint32_t dtypes, const Shape& shape);
    Array inout(const char* name, uint32_t dtypes);
    List list(const char* name, uint32_t dtypes, bool written);  // a Python list of tensors of one dtype; it may be empty
    int64_t integer(const char* name, int64_t low = INT64_MIN, int64_t high = INT64_MAX);
    double real(const char* name);  // finite
    bool flag(const char* name);
    void ready();                                        // no argument is left, no written array overlaps another
    [[noreturn]] void refuse(const char* format, ...);   // for what a kernel itself finds wrong with its arguments
    void* stream = nullptr;                              // CUDA: the caller's current stream

    struct State;
    explicit Call(State& state) : state(state) {}

private:
    Array next(const char* name, uint32_t dtypes, const Shape* shape, bool written, bool optional);
    State& state;
};

// Run f(begin, end) over [0, n) in torch's own thread pool, at least `grain` items each; f must not throw.
void parallel(int64_t n, int64_t grain, void (*f)(void*, int64_t, int64_t), void* data);

template <class F>
void parallel(int64_t n, int64_t grain, F f) {
    parallel(n, grain, [](void* data, int64_t begin, int64_t end) { (*static_cast<F*>(data))(begin, end); }, &f);
}

int threads();  // how many `parallel` may use

struct Kernel {
    Kernel(const char* name, int level, void (*run)(Call&));
    const char* name;
    int level;  // MC_LEVEL: 0 any CPU, 1 AVX2, 2 AVX-512, 100 CUDA
    void (*run)(Call&);
    const Kernel* next;
};

}  // namespace mc

namespace {

using mc::Array;
using mc::BF16;
using mc::BOOL;
using mc::Call;
using mc::Dtype;
using mc::F16;
using mc::F32;
using mc::FLOATS;
using mc::I32;
using mc::I64;
using mc::I8;
using mc::Shape;
using mc::U8;

}  // namespace

// Run `body` with T being the C++ type of a dtype: float, and the structs bf16 and fp16 of simd.h and half.h.
#define MC_FOR_FLOAT(dtype, T, ...)      \
    switch (dtype) {                     \
        case mc::F32: {                  \
            using T = float;             \
            __VA_ARGS__;                 \
            break;                       \
        }                                \
        case mc::BF16: {                 \
            using T = bf16;              \
            __VA_ARGS__;                 \
            break;                       \
        }                                \
        default: {                       \
            using T = fp16;              \
            __VA_ARGS__;                 \
            break;                       \
        }                                \
    }

// Run `body` with NAME being a constant.
#define MC_FOR_BOOL(condition, NAME, ...)   \
    if (condition) {                        \
        constexpr bool NAME = true;         \
        __VA_ARGS__;                        \
    } else {                                \
        constexpr bool NAME = false;        \
        __VA_ARGS__;                        \
    }

// The function is not static: nvcc names a file's anonymous namespace after its first public function, or else after the process.
#define MC_RUN_(name, level) run_##name##_##level
#define MC_RUN(name, level) MC_RUN_(name, level)
#define MC_KERNEL(name)                                                                        \
    void MC_RUN(name, MC_LEVEL)(mc::Call & call);                                              \
    static const mc::Kernel kernel_##name{#name, MC_LEVEL, MC_RUN(name, MC_LEVEL)};            \
    void MC_RUN(name, MC_LEVEL)(mc::Call & call)
