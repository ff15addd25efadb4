// What the module asks of the CUDA runtime itself. The runtime is linked statically and shares torch's primary context.
#include <cuda_runtime.h>

#include <cstdint>

namespace mc::cuda {

int32_t devices() {
    int32_t count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;  // 35: no driver here
}

int32_t enter(int32_t device) {
    int32_t before = 0;
    cudaGetDevice(&before);
    if (before != device) cudaSetDevice(device);
    return before;
}

const char* leave(int32_t before) {
    const cudaError_t error = cudaGetLastError();
    int32_t now = 0;
    cudaGetDevice(&now);
    if (now != before) cudaSetDevice(before);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

const char* built_for() { return MC_ARCHITECTURES; }

}  // namespace mc::cuda
