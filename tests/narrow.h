// For a build in which what kernels hold in an `int` has 16 bits (test_narrow.py). They index by int64_t; an int is for what does
// not grow with a tensor: a lane, the rows of a tile. One that does grow is wrong here from 32768 on, where a test can afford it,
// and not only from 2^31 on. What has an int as another sees it is declared before; what CUDA's own functions are told by pointer is
// an int32_t. For the kernels of a GPU, on its machine:
//
//     export NVCCFLAGS="-include $PWD/tests/narrow.h"
//     python setup.py build_ext --build-temp build/narrow --build-lib build/narrow
//     export MODELCENTER_KERNELS=$(ls build/narrow/modelcenter/_C*) PYTHONPATH=.
//     python tests/fuzz_ops.py --device cuda --large --cases 500 --compare 1
#ifdef MC_LEVEL
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#ifdef __CUDACC__
#include "../csrc/cuda.h"
#include "../csrc/ptx.h"
#else
#include "emulate/amx.h"  // in whose place a processor's own instructions would not know such an int
#endif
#include "../csrc/kernel.h"
#define int short
#endif
