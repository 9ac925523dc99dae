// The tile registers of AMX in plain C++, for tests on processors without them: 16 rows of 64 bytes, and sums in the
// order that Intel's manual gives for TDPBF16PS (first elements of the pairs, then second ones, then both to the result).
#pragma once
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps

namespace {

struct Tile { alignas(64) uint32_t unit[16][16]; };
inline Tile& tile_register(int number) {
    static thread_local Tile all[8];
    return all[number];
}

inline void _tile_loadconfig(const void*) {}
inline void _tile_release() {}
inline void _tile_zero(int t) { std::memset(&tile_register(t), 0, sizeof(Tile)); }
inline void _tile_loadd(int t, const void* from, int64_t stride) {
    for (int row = 0; row < 16; ++row) std::memcpy(tile_register(t).unit[row], static_cast<const char*>(from) + row * stride, 64);
}
inline void _tile_stored(int t, void* to, int64_t stride) {
    for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, tile_register(t).unit[row], 64);
}
inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void _tile_dpbf16ps(int sum, int left, int right) {
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < 16; ++column) {
            float first = 0, second = 0;
            for (int k = 0; k < 16; ++k) {
                const uint32_t a = tile_register(left).unit[row][k], b = tile_register(right).unit[k][column];
                first += as_float(a << 16) * as_float(b << 16);
                second += as_float(a & 0xffff0000) * as_float(b & 0xffff0000);
            }
            const float total = as_float(tile_register(sum).unit[row][column]) + (first + second);
            std::memcpy(&tile_register(sum).unit[row][column], &total, 4);
        }
}

}  // namespace
