// Conversions of numbers of 16 bits, rounded to nearest, ties to even.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulate {

inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline uint16_t bf16_of(float x) {
    const uint32_t u = bits_of(x);
    return static_cast<uint16_t>(x != x ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

inline uint16_t fp16_of(float x) {
    const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, size = u & 0x7FFFFFFF;
    if (size > 0x7F800000) return 0x7FFF;
    if (size >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // 65520 and more
    if (size < 0x38800000)  // denormal: 0.5's last bit is 2^-24
        return static_cast<uint16_t>(sign | (bits_of(std::fabs(x) + 0.5f) - bits_of(0.5f)));
    return static_cast<uint16_t>(sign | (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13);
}
inline float fp16_value(uint16_t h) {
    const uint32_t sign = uint32_t{h & 0x8000u} << 16, size = h & 0x7FFFu;
    if (size >= 0x7C00) return as_float(sign | 0x7F800000 | (size & 0x3FF) << 13);
    if (size < 0x400) return as_float(sign | bits_of(static_cast<float>(size) * 0x1p-24f));
    return as_float(sign | ((size << 13) + 0x38000000));
}

}  // namespace emulate
