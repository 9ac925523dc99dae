// Linear layers on weights that were packed once, at load.
#pragma once
#include "tile.h"

extern "C" {

enum Gate : int64_t { NONE, SILU, GELU_TANH, GELU, RELU, RELU_SQUARED, SWIGLU };  // SWIGLU: of experts only

struct LinearCall {
    const void *x, *weight;  // x [rows][depth]; weight as written by pack_weight
    const float* bias;       // [columns] or null
    const void* residual;    // added to the result: [rows][columns] like out, or null; not with a gate
    void* out;               // [rows][columns]; with a gate: [rows][columns / 2]
    int64_t rows, depth, columns, x_stride, out_stride;
    int64_t gate;  // a Gate; if any, columns are gates and values in turn, VL of each, and out is f(gate) * value
};
}

namespace {

inline vec activated(int64_t gate, vec x) {
    switch (gate) {
        case SILU: return silu(x);
        case GELU_TANH: return gelu_tanh(x);
        case GELU: return gelu(x);
        case RELU: return relu(x);
        case RELU_SQUARED: return relu(x) * relu(x);
        default: return x;
    }
}

constexpr int BLOCK_ROWS = 192;          // most rows of A that are packed at a time: a multiple of MR and MOST_ROWS
constexpr int BLOCK_BYTES = 512 << 10;   // and their bytes: half of a common L2 cache
// From so many tiles on, a pass of B is widened once for all of them. Fewer, and all with vectors of 8 floats, lose less
// by widening it in registers, each for itself.
constexpr int MANY_TILES = VL == 8 ? BLOCK_ROWS : VL == 4 ? 2 : 4;

// weight [columns][depth] -> [panels][units][NR] with zeros behind the last column and the last element
template <class T> void pack_weight(const typename T::Element* weight, int64_t columns, int64_t depth, int32_t* packed) {
    const int64_t units = ceil_div(depth, T::PER_UNIT), panels = ceil_div(columns, NR);
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels; ++panel) {
        auto* target = reinterpret_cast<typename T::Element*>(packed + panel * units * NR);
        std::memset(target, 0, units * NR * 4);
        for (int64_t j = 0; j < std::min<int64_t>(NR, columns - panel * NR); ++j)
            for (int64_t k = 0; k < depth; ++k)
                target[(k / T::PER_UNIT * NR + j) * T::PER_UNIT + k % T::PER_UNIT] = weight[(panel * NR + j) * depth + k];
    }
}

// A packed weight, and rows of the same depth to multiply by it.
template <class T> struct Weight {
    using Element = typename T::Element;
    const int32_t* packed;
    int64_t depth, columns;
    const int64_t units = ceil_div(depth, T::PER_UNIT), passes = ceil_div(units, T::KC), panels = ceil_div(columns, NR);
    const bool amx = uses_amx<T>();  // however few rows: a row's sums must not depend on how many there are
    const int64_t step = amx ? MOST_ROWS : MR;
    const int64_t block = std::clamp<int64_t>(BLOCK_BYTES / (passes * WORDS * 4) / step, 1, BLOCK_ROWS / step) * step;

    int64_t depth_of(int64_t pass) const { return std::min<int64_t>(T::KC, units - pass * T::KC); }

    // one row of x -> its part in each pass, as number `row` of a[passes][rows][LDA]
    void pack(const Element* x, int64_t row, int64_t rows, int32_t* a) const {
        for (int64_t pass = 0; pass < passes; ++pass)
            pack_row<T>(x, depth, pass * T::KC, depth_of(pass), a + (pass * rows + row) * LDA);
    }

    // all rows of `a` times one panel of the weight -> sums[rows][NR]
    void multiply_panel(int64_t panel, const Tiles& tiles, const int32_t* a, float* sums) const {
        const auto* b = packed + panel * units * NR;
        for (int64_t pass = 0; pass < passes; ++pass) {
            const int64_t depth = depth_of(pass), share = depth * NR;
            const int64_t ahead = tiles.count > 1 ? share : std::min<int64_t>(share, amx ? AHEAD_OF_TILES : AHEAD);
            alignas(64) int32_t wide[T::PARTS > 1 ? WORDS * NR : 1];
            const bool widens = T::PARTS > 1 && tiles.count >= MANY_TILES;
            if (widens) widen<T>(b, depth, wide);
            for (int64_t tile = 0; tile < tiles.count; ++tile) {
                const int64_t top = tiles.start(tile);
                // several tiles share out the fetching of the next pass, which follows this one in memory
                Product product{a + (pass * tiles.rows + top) * LDA, b, depth, sums + top * NR, NR, pass > 0,
                                b + ahead + share * tile / tiles.count, NR / tiles.count};
                if (widens) {
                    product.b = wide, product.units *= T::PARTS, product.next_step = ceil_div(NR, tiles.count * T::PARTS);
                    multiply_rows<Float32>(tiles.height(tile), product, false);
                } else {
                    multiply_rows<T>(tiles.height(tile), product, amx);
                }
            }
            b += share;
        }
    }
};

template <class T> struct Linear {
    using Element = typename T::Element;
    const LinearCall& call;
    const Weight<T> weight{static_cast<const int32_t*>(call.weight), call.depth, call.columns};

    void finish(int64_t row, int64_t panel, const float* sums) const {
        auto* out = static_cast<Element*>(call.out) + row * call.out_stride;
        const auto* residual = static_cast<const Element*>(call.residual) + row * call.out_stride;
        vec v[2];
        for (int h = 0; h < 2; ++h) {
            const int64_t column = panel * NR + h * VL, left = call.columns - column;
            v[h] = load<vec>(sums + h * VL);
            if (left <= 0) return;
            if (call.bias) v[h] += read_part<Float32>(call.bias + column, left);
            if (call.residual) v[h] += read_part<T>(residual + column, left);
            if (call.gate == NONE) write_part<T>(out + column, v[h], left);
        }
        if (call.gate != NONE) T::write(out + panel * VL, activated(call.gate, v[0]) * v[1]);
    }

    void run() const {
        static thread_local std::vector<int32_t> buffer;
        int32_t* a = scratch(buffer, (weight.block * weight.passes + MOST_ROWS) * LDA);
        const auto* x = static_cast<const Element*>(call.x);
        for (int64_t top = 0; top < call.rows; top += weight.block) {
            const Tiles tiles{std::min(weight.block, call.rows - top), weight.amx};
#pragma omp parallel num_threads(threads) if (weight.units * call.columns > 16384)
            {
                const TileRegisters registers(weight.amx);
#pragma omp for
                for (int64_t row = 0; row < tiles.rows; ++row) weight.pack(x + (top + row) * call.x_stride, row, tiles.rows, a);
#pragma omp for
                for (int64_t panel = 0; panel < weight.panels; ++panel) {
                    alignas(64) float sums[BLOCK_ROWS * NR];
                    weight.multiply_panel(panel, tiles, a, sums);
                    for (int64_t row = 0; row < tiles.rows; ++row) finish(top + row, panel, sums + row * NR);
                }
            }
        }
    }
};

}  // namespace
