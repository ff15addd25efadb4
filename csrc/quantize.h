// What NF4 and int8 codes mean (modelcenter/ops/quantize.py has the formulas), for the CPU and the CUDA kernels alike.
#pragma once
#include <cstdint>

namespace {

constexpr int GROUP = 64;             // NF4 weights that share a scale; groups end with a row
constexpr float TINY = 0x1p-119f;     // below it a scale is 0: a step of 1/127 of it would be subnormal, and may be flushed
constexpr float HIGH = 0x1.0204p-7f;  // HIGH + LOW is 1/127, and q * HIGH + q * LOW is q / 127, rounded once, for every int8 q,
constexpr float LOW = 0x1.020408p-28f;  // whether or not the compiler fuses the sum

// Dettmers et al., 2023, appendix E
#define MC_NF4_LEVELS                                                                                                             \
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,       \
        -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,      \
        0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f

// The middle of two levels, rounded down: a float is above it exactly if it is nearer to the upper level; a tie takes the lower
#define MC_NF4_MIDDLES                                                                                                            \
    -0x1.b239b2p-1f, -0x1.38a4e2p-1f, -0x1.d70900p-2f, -0x1.5bd4eep-2f, -0x1.e079dap-3f, -0x1.1a7178p-3f, -0x1.74f0e2p-5f,        \
        0x1.45f5fep-5f, 0x1.ec90c4p-4f, 0x1.a0cfc0p-3f, 0x1.2b05a8p-2f, 0x1.8ea7f2p-2f, 0x1.00da06p-1f, 0x1.491b5ep-1f,           \
        0x1.b913b2p-1f

constexpr uint32_t ZERO_CODE = 7;  // what the half of a last byte that no weight uses holds

}  // namespace
