// CUDA for a processor: csrc/*.cu compiled by g++ and run without a GPU, to check arithmetic, bounds and synchronisation.
//
// build.py compiles a copy of csrc in which launches and shared memory are written as C++ knows them:
//
//     kernel<T><<<grid, threads, bytes, stream>>>(x, n)    kernel<T> ->* emulate::Grid(grid, threads, bytes, stream)(x, n)
//     __shared__ float sums[32];                           static float sums[32]; emulate::fresh(sums);
//     extern __shared__ uint4 memory[];                    uint4* const memory = emulate::dynamic<uint4>();
//
// Blocks run one after another. The threads of a block are fibers (block.h) that run until they wait for each other. Shared memory
// is filled with bytes of 255, a NaN, for every block; AddressSanitizer sees its ends, since an array is a variable or an
// allocation of its own. A barrier that some threads do not come to, or lanes that meet at different calls, are an exception.
//
// What stands in PTX is a function of its own in csrc (ptx.h), with a second body under `#ifdef MC_EMULATED` out of these:
//
//     emulate::exchange(&mine, sizeof mine, all);       // a whole warp: each lane gives up to 64 bytes and gets those of all 32,
//                                                       // by lane, in `all`. It is a __syncwarp() too
//     emulate::barrier(number, threads);                // bar.sync
//     emulate::copy_async(to, from, bytes, given);      // cp.async: `given` bytes are copied, the rest of `bytes` is zeros
//     emulate::commit_async(); emulate::wait_async(n);  // until at most n groups of this thread are on their way
//
// So ldmatrix, for one, is: every lane gives its address by `exchange`, then reads of the rows what is its own; mma.sync: every
// lane gives its fragments, then sums up what is its own of the product. __CUDACC__ is defined, __CUDA_ARCH__ is not.
//
//     file=$(python tests/emulate/build.py build/emulated --only attention)
//     MODELCENTER_KERNELS=$file python tests/emulate/pretend.py tests/fuzz_ops.py --cases 100 --only attention
//     MODELCENTER_KERNELS=$file PYTHONPATH=.:tests pytest -p emulate.pretend tests/test_kernels.py -k attention
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "block.h"
#include "launch.h"
#include "numbers.h"
#include "runtime.h"
