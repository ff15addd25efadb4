// The Python module modelcenter._C: one callable for each kernel, in `cpu` and in `cuda`, and what was built.
//
// This file alone knows Python, and torch only by the attributes of its tensors, so that one build serves every torch. Every
// pointer a kernel gets passes through `look` below: a plain tensor (not a subclass, whose data_ptr may be 0), contiguous, of a
// known dtype, on the right device, with all of its memory there.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>
#ifndef _WIN32
#include <dlfcn.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

#include "kernel.h"

namespace py = pybind11;

#ifdef MC_CUDA
namespace mc::cuda {  // device.cu
int devices();
int enter(int device);                       // make it current; the one before
const char* leave(int before);               // back again; what a launch failed with, or null
const char* built_for();
}  // namespace mc::cuda
#endif

namespace mc {

static const Kernel* first = nullptr;

Kernel::Kernel(const char* name, int level, void (*run)(Call&)) : name(name), level(level), run(run), next(first) { first = this; }

// ---- threads: torch's libgomp, found in the process rather than linked, so that there is one pool and no dependency

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using Number = int (*)();
Parallel gomp_parallel = nullptr;
Number thread_number = nullptr, team_size = nullptr, max_threads = nullptr, in_parallel = nullptr;

void find_threads() {
#ifndef _WIN32
    gomp_parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    thread_number = reinterpret_cast<Number>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    team_size = reinterpret_cast<Number>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
    max_threads = reinterpret_cast<Number>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    in_parallel = reinterpret_cast<Number>(dlsym(RTLD_DEFAULT, "omp_in_parallel"));
#endif
    if (!(gomp_parallel && thread_number && team_size && max_threads && in_parallel)) gomp_parallel = nullptr;
}

struct Job {
    void (*f)(void*, int64_t, int64_t);
    void* data;
    int64_t n;
};

void share(void* pointer) {
    const Job& job = *static_cast<Job*>(pointer);
    const int64_t team = team_size(), me = thread_number(), each = job.n / team, more = job.n % team;
    const int64_t begin = me * each + (me < more ? me : more), end = begin + each + (me < more);
    if (begin < end) job.f(job.data, begin, end);
}

}  // namespace

int threads() { return gomp_parallel && !in_parallel() ? max_threads() : 1; }

void parallel(int64_t n, int64_t grain, void (*f)(void*, int64_t, int64_t), void* data) {
    int64_t team = threads();
    if (grain > 0 && (n + grain - 1) / grain < team) team = (n + grain - 1) / grain;
    if (n <= 0) return;
    if (team <= 1) return f(data, 0, n);
    Job job{f, data, n};
    gomp_parallel(share, &job, static_cast<unsigned>(team), 0);
}

// ---- arguments

namespace {

struct Names {  // interned once
    PyObject *data_ptr = PyUnicode_InternFromString("data_ptr"), *dtype = PyUnicode_InternFromString("dtype"),
             *shape = PyUnicode_InternFromString("shape"), *is_contiguous = PyUnicode_InternFromString("is_contiguous"),
             *get_device = PyUnicode_InternFromString("get_device"), *is_cuda = PyUnicode_InternFromString("is_cuda"),
             *is_cpu = PyUnicode_InternFromString("is_cpu"), *numel = PyUnicode_InternFromString("numel"),
             *is_neg = PyUnicode_InternFromString("is_neg"), *storage = PyUnicode_InternFromString("untyped_storage"),
             *nbytes = PyUnicode_InternFromString("nbytes");
};
const Names& names() {
    static const Names all;
    return all;
}
PyObject *tensor_type = nullptr, *parameter_type = nullptr, *stream_of = nullptr;
PyObject* dtypes[9] = {};  // in the order of the bits of Dtype
const char* dtype_names[9] = {"float32", "float16", "bfloat16", "int64", "int32", "uint8", "int8", "bool", "float64"};
const int dtype_bytes[9] = {4, 2, 2, 8, 4, 1, 1, 1, 8};

std::string listed(uint32_t set) {
    std::string text;
    for (int i = 0; i < 9; i++)
        if (set >> i & 1) text += (text.empty() ? "" : " or ") + std::string(dtype_names[i]);
    return text;
}

std::string shown(const Shape& shape) {
    std::string text = "(";
    for (int i = 0; i < shape.rank; i++) text += (i ? ", " : "") + std::to_string(shape.at[i]);
    return text + ")";
}

py::object get(PyObject* object, PyObject* name) {
    PyObject* found = PyObject_GetAttr(object, name);
    if (!found) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(found);
}

py::object ask(PyObject* object, PyObject* method) {
    PyObject* found = PyObject_CallMethodNoArgs(object, method);
    if (!found) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(found);
}

}  // namespace

struct Call::State {
    const Kernel* kernel;
    PyObject* const* args;
    Py_ssize_t count, at = 0;
    int device = -2;  // -2: not yet known, -1: the CPU
    struct Range {
        const char *begin, *end;
        bool written;
        const char* name;
    } ranges[32];
    int ranged = 0;
    std::vector<std::vector<List::Piece>> lists;
    std::vector<Range> many;            // the ranges of the tensors in lists
    PyThreadState* released = nullptr;  // the interpreter runs on while a CPU kernel computes
    int before = -1;                    // the CUDA device that was current

    void resume() {
        if (released) PyEval_RestoreThread(released);
        released = nullptr;
    }

    PyObject* take(const char* name) {
        if (at >= count) throw std::invalid_argument(std::string(kernel->name) + ": " + name + " is missing");
        return args[at++];
    }
    [[noreturn]] void wrong(const char* name, const std::string& text) const {
        throw std::invalid_argument(std::string(kernel->name) + ": " + name + ": " + text);
    }
};

// What is behind a tensor, when it is one that a kernel may touch; `flat`: as one axis, which is quicker to ask for.
static Array read(Call::State& state, const char* name, PyObject* object, uint32_t allowed, bool flat) {
    Array array;
    const py::object dtype = get(object, names().dtype);
    int kind = 0;
    while (kind < 9 && dtypes[kind] != dtype.ptr()) kind++;
    if (kind == 9 || !(allowed >> kind & 1)) state.wrong(name, py::str(dtype).cast<std::string>() + "; wanted " + listed(allowed));
    const bool cuda = state.kernel->level == 100;
    if (get(object, cuda ? names().is_cuda : names().is_cpu).ptr() != Py_True)
        state.wrong(name, std::string("not on ") + (cuda ? "a CUDA device" : "the CPU"));
    const int device = cuda ? ask(object, names().get_device).cast<int>() : -1;
    if (state.device == -2) state.device = device;
    if (device != state.device) state.wrong(name, "on another device than the arguments before it");
    if (flat) {
        array.shape = Shape{PyLong_AsLongLong(ask(object, names().numel).ptr())};
    } else {
        const py::object sizes = get(object, names().shape);
        const Py_ssize_t rank = PyTuple_Size(sizes.ptr());
        if (rank > 8) state.wrong(name, std::to_string(rank) + " dimensions; at most 8");
        array.shape.rank = static_cast<int>(rank);
        for (Py_ssize_t i = 0; i < rank; i++) array.shape.at[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i));
    }
    if (ask(object, names().is_contiguous).ptr() != Py_True) state.wrong(name, "not contiguous");
    array.data = PyLong_AsVoidPtr(ask(object, names().data_ptr).ptr());
    array.dtype = static_cast<Dtype>(1u << kind);
    array.given = true;
    if (!array.data && array.shape.count()) state.wrong(name, "no memory behind it");
    if (reinterpret_cast<uintptr_t>(array.data) % dtype_bytes[kind]) state.wrong(name, "not aligned to its elements");
    if (ask(object, names().is_neg).ptr() != Py_False) state.wrong(name, "its numbers are to be negated when read (resolve_neg)");
    // A storage may have been resized under its tensor. To nothing, it has no pointer; to less, asking costs 0.4 us a tensor, which a
    // kernel of the CPU can bear; one of CUDA would be slower by a tenth, and no signal comes of reading there.
    if (array.data && !cuda) {
        const py::object storage = ask(object, names().storage);
        const char* begin = static_cast<const char*>(PyLong_AsVoidPtr(ask(storage.ptr(), names().data_ptr).ptr()));
        const int64_t bytes = PyLong_AsLongLong(ask(storage.ptr(), names().nbytes).ptr());
        const int64_t before = static_cast<const char*>(array.data) - begin;
        if (before < 0 || bytes - before < array.shape.count() * dtype_bytes[kind]) state.wrong(name, "its storage ends before it does");
    }
    return array;
}

static Array look(Call::State& state, const char* name, PyObject* object, uint32_t allowed, bool flat = false) {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (type != tensor_type && type != parameter_type)
        state.wrong(name, std::string("a ") + Py_TYPE(object)->tp_name + "; wanted a torch.Tensor and no subclass");
    try {
        return read(state, name, object, allowed, flat);
    } catch (py::error_already_set& error) {  // a nested tensor has no shape, one of another library no pointer
        state.wrong(name, py::str(error.value()).cast<std::string>());
    }
}

static Call::State::Range range_of(const Array& array, bool written, const char* name) {
    int kind = 0;
    while (!(array.dtype >> kind & 1)) kind++;
    const char* begin = static_cast<const char*>(array.data);
    return {begin, begin + array.shape.count() * dtype_bytes[kind], written, name};
}

Array Call::next(const char* name, uint32_t allowed, const Shape* shape, bool written, bool optional) {
    PyObject* object = state.take(name);
    if (optional && object == Py_None) return {};
    const Array array = look(state, name, object, allowed);
    if (shape && !(*shape == array.shape)) state.wrong(name, "shape " + shown(array.shape) + "; wanted " + shown(*shape));
    if (state.ranged == 32) state.wrong(name, "too many tensors");
    state.ranges[state.ranged++] = range_of(array, written, name);
    return array;
}

List Call::list(const char* name, uint32_t allowed, bool written) {
    PyObject* object = state.take(name);
    if (!PyList_CheckExact(object)) state.wrong(name, std::string("a ") + Py_TYPE(object)->tp_name + "; wanted a list of tensors");
    std::vector<List::Piece> pieces(PyList_GET_SIZE(object));
    List list;
    for (size_t i = 0; i < pieces.size(); i++) {
        if (PyList_GET_SIZE(object) != static_cast<Py_ssize_t>(pieces.size())) state.wrong(name, "a list that changes");
        const Array array = look(state, name, PyList_GET_ITEM(object, i), allowed, true);
        if (i && array.dtype != list.dtype) state.wrong(name, "tensors of several dtypes");
        list.dtype = array.dtype;
        pieces[i] = {array.data, array.shape.count()};
        state.many.push_back(range_of(array, written, name));
    }
    state.lists.push_back(std::move(pieces));
    list.at = state.lists.back().data(), list.n = static_cast<int64_t>(state.lists.back().size());
    return list;
}

Array Call::in(const char* name, uint32_t dtypes) { return next(name, dtypes, nullptr, false, false); }
Array Call::in(const char* name, uint32_t dtypes, const Shape& shape) { return next(name, dtypes, &shape, false, false); }
Array Call::maybe(const char* name, uint32_t dtypes) { return next(name, dtypes, nullptr, false, true); }
Array Call::maybe(const char* name, uint32_t dtypes, const Shape& shape) { return next(name, dtypes, &shape, false, true); }
Array Call::out(const char* name, uint32_t dtypes, const Shape& shape) { return next(name, dtypes, &shape, true, false); }
Array Call::maybe_out(const char* name, uint32_t dtypes, const Shape& shape) { return next(name, dtypes, &shape, true, true); }
Array Call::inout(const char* name, uint32_t dtypes, const Shape& shape) { return next(name, dtypes, &shape, true, false); }
Array Call::inout(const char* name, uint32_t dtypes) { return next(name, dtypes, nullptr, true, false); }

int64_t Call::integer(const char* name, int64_t low, int64_t high) {
    PyObject* object = state.take(name);
    if (!PyLong_CheckExact(object)) state.wrong(name, std::string("a ") + Py_TYPE(object)->tp_name + "; wanted an int");
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow) state.wrong(name, "an int of more than 64 bits");
    if (value < low || value > high)
        state.wrong(name, py::str(object).cast<std::string>() + "; wanted " + std::to_string(low) + " to " + std::to_string(high));
    return value;
}

double Call::real(const char* name) {
    PyObject* object = state.take(name);
    if (!PyFloat_Check(object) && !PyLong_CheckExact(object))
        state.wrong(name, std::string("a ") + Py_TYPE(object)->tp_name + "; wanted a number");
    const double value = PyFloat_AsDouble(object);
    if (PyErr_Occurred()) PyErr_Clear(), state.wrong(name, "more than a double can hold");
    if (!std::isfinite(value)) state.wrong(name, std::to_string(value) + "; wanted a finite number");
    return value;
}

bool Call::flag(const char* name) {
    PyObject* object = state.take(name);
    if (!PyBool_Check(object)) state.wrong(name, std::string("a ") + Py_TYPE(object)->tp_name + "; wanted True or False");
    return object == Py_True;
}

void Call::ready() {
    if (state.at != state.count) state.wrong("arguments", std::to_string(state.count) + "; wanted " + std::to_string(state.at));
    for (int i = 0; i < state.ranged; i++)
        for (int j = 0; j < state.ranged; j++) {
            const State::Range &a = state.ranges[i], &b = state.ranges[j];
            if (i != j && a.written && a.begin < b.end && b.begin < a.end && a.begin < a.end && b.begin < b.end)
                state.wrong(a.name, std::string("is written and overlaps ") + b.name);
        }
    if (!state.many.empty()) {  // too many for pairs: in the order of memory, each against what reaches furthest before it
        std::vector<State::Range>& all = state.many;
        all.insert(all.end(), state.ranges, state.ranges + state.ranged);
        all.erase(std::remove_if(all.begin(), all.end(), [](const State::Range& r) { return r.begin == r.end; }), all.end());
        std::sort(all.begin(), all.end(), [](const State::Range& a, const State::Range& b) { return a.begin < b.begin; });
        const State::Range *any = nullptr, *written = nullptr;
        for (const State::Range& r : all) {
            if (written && r.begin < written->end) state.wrong(written->name, std::string("is written and overlaps ") + r.name);
            if (any && r.written && r.begin < any->end) state.wrong(r.name, std::string("is written and overlaps ") + any->name);
            if (!any || r.end > any->end) any = &r;
            if (r.written && (!written || r.end > written->end)) written = &r;
        }
    }
    if (state.device >= 0) {
        PyObject* number = PyLong_FromLong(state.device);
        PyObject* found = stream_of ? PyObject_CallOneArg(stream_of, number) : nullptr;
        Py_DECREF(number);
        if (!found) {
            if (PyErr_Occurred()) throw py::error_already_set();
            state.wrong("stream", "torch has not told how to find it");
        }
        stream = PyLong_AsVoidPtr(found);
        Py_DECREF(found);
#ifdef MC_CUDA
        state.before = cuda::enter(state.device);
#endif
    } else {
        state.released = PyEval_SaveThread();
    }
}

void Call::refuse(const char* format, ...) {
    char text[256];
    va_list rest;
    va_start(rest, format);
    vsnprintf(text, sizeof text, format, rest);
    va_end(rest);
    throw std::invalid_argument(std::string(state.kernel->name) + ": " + text);
}

// ---- the module

static PyObject* run(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    const auto* kernel = static_cast<const Kernel*>(PyCapsule_GetPointer(self, nullptr));
    if (!kernel) return nullptr;
    Call::State state{kernel, args, count};
    PyObject* kind = nullptr;  // what went wrong, and its words
    std::string text;
    try {
        if (!tensor_type) throw std::invalid_argument("modelcenter._C is not connected to torch: import modelcenter.ops");
        Call call(state);
        kernel->run(call);
    } catch (py::error_already_set& error) {
        error.restore();
        return nullptr;
    } catch (const std::invalid_argument& error) {
        kind = PyExc_ValueError, text = error.what();
    } catch (const std::exception& error) {
        kind = PyExc_RuntimeError, text = error.what();
    }
    state.resume();
#ifdef MC_CUDA
    if (state.before >= 0)
        if (const char* failed = cuda::leave(state.before); failed && !kind) kind = PyExc_RuntimeError, text = std::string(kernel->name) + ": " + failed;
#endif
    if (kind) return PyErr_SetString(kind, text.c_str()), nullptr;
    Py_RETURN_NONE;
}

static int cpu_level() {
#if defined(__x86_64__) && defined(__GNUC__)
    unsigned a = 0, b = 0, features = 0, d = 0;  // clang 14 knows no "f16c" by name
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &features, &d) &&
        (features & bit_F16C))
        return 1;
#endif
    return 0;
}

static void connect(py::object torch, py::object current_stream) {
    auto keep = [](py::object object) { return object.release().ptr(); };
    for (int i = 0; i < 9; i++) dtypes[i] = keep(torch.attr(dtype_names[i]));
    parameter_type = keep(torch.attr("nn").attr("Parameter"));
    stream_of = current_stream.is_none() ? nullptr : keep(current_stream);
    tensor_type = keep(torch.attr("Tensor"));
    find_threads();
}

// For every name the best kernel between two levels; the highest that one has, -1 if there is none.
static int enlist(py::module_ module, int low, int high) {
    std::map<std::string, const Kernel*> best;
    int most = -1;
    for (const Kernel* kernel = first; kernel; kernel = kernel->next)
        if (kernel->level >= low && kernel->level <= high) {
            const Kernel*& found = best[kernel->name];
            if (!found || found->level < kernel->level) found = kernel;
        }
    for (const auto& [name, kernel] : best) {
        most = kernel->level > most ? kernel->level : most;
        auto* method = new PyMethodDef{kernel->name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run)), METH_FASTCALL,
                                       nullptr};
        PyObject* capsule = PyCapsule_New(const_cast<Kernel*>(kernel), nullptr, nullptr);
        module.attr(name.c_str()) = py::reinterpret_steal<py::object>(PyCFunction_New(method, capsule));
        Py_DECREF(capsule);
    }
    return most;
}

}  // namespace mc

PYBIND11_MODULE(_C, m) {
    using namespace mc;
    const char* limit = std::getenv("MODELCENTER_CPU");  // base, avx2 or avx512 (product.h): for tests and for doubt
    int level = cpu_level();
    if (limit && !std::strcmp(limit, "base")) level = 0;
    if (limit && !std::strcmp(limit, "avx2") && level > 1) level = 1;
    m.attr("version") = MC_VERSION;
    level = enlist(m.def_submodule("cpu"), 0, level);  // a compiler may not have known the best that the processor has
    m.attr("cpu_level") = level == 2 ? "avx512" : level == 1 ? "avx2" : level == 0 ? "base" : "none";
    py::module_ cuda = m.def_submodule("cuda");
#ifdef MC_CUDA
    enlist(cuda, 100, 100);
    m.attr("cuda_architectures") = mc::cuda::built_for();
    m.def("cuda_devices", &mc::cuda::devices, "How many CUDA devices this build can see; 0 without a driver.");
#else
    m.attr("cuda_architectures") = "";
    m.def("cuda_devices", [] { return 0; });
#endif
    m.def("connect", &connect, py::arg("torch"), py::arg("current_stream"));
}
