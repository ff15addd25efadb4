#include "runtime.h"

#include <cstdio>
#include <cstdlib>
#include <map>

namespace {

cudaError_t last = cudaSuccess;
std::map<const void*, int> opened;  // kernels that may have more dynamic shared memory than others

struct Chip {
    int multiprocessors = 3, shared = 228;  // KB
    Chip() {
        if (const char* wanted = std::getenv("MODELCENTER_EMULATE")) std::sscanf(wanted, "%d %d", &multiprocessors, &shared);
    }
    int major() const { return shared >= 228 ? 9 : shared >= 100 ? 8 : 7; }
    int minor() const { return major() == 7 ? 5 : 0; }
    int of_a_block() const { return major() == 7 ? shared : shared - 1; }
};
const Chip chip;

}  // namespace

int emulate_chip() { return 10 * chip.major() + chip.minor(); }

cudaError_t cudaGetLastError() {
    const cudaError_t error = last;
    last = cudaSuccess;
    return error;
}

const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorInvalidConfiguration ? "invalid configuration argument" : error ? "invalid argument" : "no error";
}

cudaError_t cudaDeviceGetAttribute(int32_t* value, cudaDeviceAttr which, int32_t) {
    *value = which == cudaDevAttrMultiProcessorCount ? chip.multiprocessors
             : which == cudaDevAttrComputeCapabilityMajor ? chip.major()
             : which == cudaDevAttrComputeCapabilityMinor ? chip.minor()
             : (which == cudaDevAttrMaxSharedMemoryPerBlockOptin ? chip.of_a_block() : chip.shared) * 1024;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int32_t value) {
    if (which != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value > chip.of_a_block() * 1024) return last = cudaErrorInvalidValue;
    opened[kernel] = value;
    return cudaSuccess;
}

bool emulate::fits(const void* kernel, dim3 grid, dim3 block, size_t shared) {
    const bool blocks = grid.count() > 0 && grid.x <= INT32_MAX && grid.y <= 65535 && grid.z <= 65535;
    const bool threads = block.count() > 0 && block.count() <= 1024 && block.z <= 64;
    const auto found = opened.find(kernel);
    const size_t most = found == opened.end() || found->second < 48 << 10 ? 48 << 10 : found->second;
    if (!blocks || !threads) last = cudaErrorInvalidConfiguration;
    else if (shared > most) last = cudaErrorInvalidValue;
    else return true;
    return false;
}
