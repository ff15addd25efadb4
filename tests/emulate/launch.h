// kernel ->* emulate::Grid(blocks, threads, bytes, stream)(arguments): what kernel<<<...>>>(arguments) is.
#pragma once
#include <tuple>

#include "block.h"
#include "runtime.h"

namespace emulate {

template <class... A>
struct Launch {
    dim3 grid, block;
    size_t shared;
    std::tuple<A...> arguments;
};

struct Grid {
    dim3 grid, block;
    size_t shared;
    Grid(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t = nullptr) : grid(grid), block(block), shared(shared) {}
    template <class... A>
    Launch<A...> operator()(A... arguments) const {
        return {grid, block, shared, std::tuple<A...>(arguments...)};
    }
};

template <class... P, class... A>
void operator->*(void (*kernel)(P...), const Launch<A...>& launch) {
    if (!fits(reinterpret_cast<const void*>(kernel), launch.grid, launch.block, launch.shared)) return;
    run(launch.grid, launch.block, launch.shared, [&] { std::apply(kernel, launch.arguments); });
}

}  // namespace emulate
