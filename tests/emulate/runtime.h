// What CUDA's runtime is asked for: one GPU, of which all is known.
#pragma once
#include <cstddef>
#include <cstdint>

#include "vector.h"

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
struct cudaFuncAttributes {
    int numRegs;
};

cudaError_t cudaGetLastError();  // of launches since it was last asked
const char* cudaGetErrorString(cudaError_t error);
// Multiprocessors and their shared memory in KB are MODELCENTER_EMULATE's two numbers: "3 228" where there are none; with
// 228 it is a Hopper, with 100 or more an Ampere, with 64 a Turing, of which a block may have all. Few
// multiprocessors have few blocks, so that small arrays are enough for a loop with a grid stride to go round.
extern "C" __attribute__((visibility("default"))) int emulate_chip();  // the first two digits of its number
cudaError_t cudaDeviceGetAttribute(int32_t* value, cudaDeviceAttr which, int32_t device);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int32_t value);
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) { return found->numRegs = 96, cudaSuccess; }
inline cudaError_t cudaGetDevice(int32_t* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int32_t) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int32_t* count) { return *count = 1, cudaSuccess; }

namespace emulate {

// Whether a GPU would take a launch; if not, the error is what cudaGetLastError tells.
bool fits(const void* kernel, dim3 grid, dim3 block, size_t shared);

}  // namespace emulate
