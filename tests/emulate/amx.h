// AMX by hand, so that what is computed in tiles is computed so on any processor: `-include tests/emulate/amx.h`. Tiles whose shape was
// not said end the process, as on a processor.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>  // its own words for these are replaced
#endif

#define MC_TILES
static bool tiles_here() { return true; }

namespace amx {
struct Shape {
    uint8_t palette, row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
    uint8_t of(int tile) const {
        if (palette != 1 || bytes[tile] > 64 || rows[tile] > 16) abort();
        return rows[tile];
    }
};
inline thread_local Shape shape{};
inline thread_local uint32_t tiles[8][16][16];

inline float number(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline void load(int tile, const void* from, int64_t stride) {
    memset(tiles[tile], 0, sizeof tiles[tile]);
    for (int i = 0; i < shape.of(tile); i++) memcpy(tiles[tile][i], static_cast<const char*>(from) + i * stride, shape.bytes[tile]);
}
inline void leave(int tile, void* to, int64_t stride) {
    for (int i = 0; i < shape.of(tile); i++) memcpy(static_cast<char*>(to) + i * stride, tiles[tile][i], shape.bytes[tile]);
}
inline void multiply(int c, int a, int b) {
    for (int i = 0; i < shape.of(c); i++)
        for (int j = 0; j < shape.bytes[c] / 4; j++) {
            float even = number(tiles[c][i][j]), odd = 0;
            for (int k = 0; k < shape.bytes[a] / 4; k++) {
                const uint32_t x = tiles[a][i][k], y = tiles[b][k][j];
                even += number(x << 16) * number(y << 16), odd += number(x & 0xFFFF0000u) * number(y & 0xFFFF0000u);
            }
            even += odd;
            memcpy(&tiles[c][i][j], &even, 4);
        }
}
}  // namespace amx

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_storeconfig(to) memcpy(to, &amx::shape, 64)
#define _tile_loadconfig(from) memcpy(&amx::shape, from, 64)
#define _tile_loadd amx::load
#define _tile_stored amx::leave
#define _tile_zero(tile) memset(amx::tiles[tile], 0, sizeof amx::tiles[tile])
#define _tile_dpbf16ps amx::multiply
