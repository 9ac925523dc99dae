// The register tile on which everything heavy runs: up to MR rows of A times a panel of NR columns of B, both in
// "units" of 32 bits. A unit is one float32 or two bfloat16 that are neighbours along the summed dimension, so that both
// formats share all code but the multiply-add. Sums are float32 throughout.
//
// Where the processor has no instruction for pairs of bfloat16, a unit of A is two "parts", widened to float32 when A is
// packed, and B is widened in registers, for all rows at once. So it costs what float32 costs, and half the memory.
//
// Where the processor has tile registers (AMX), bfloat16 goes through them, up to MOST_ROWS rows at once: a unit is what
// they call a pair, and a panel is two of their tiles wide, so both sides lie in memory as they want them.
//
// Built for the machine at hand (-march=native). Vectors are GCC vector extensions, so the same code serves AVX-512,
// AVX2 and others; intrinsics appear where the extension has no word for an instruction.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(EMULATE_AMX)
#define HAS_AMX 1
#include "amx_emulated.h"
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_AMX 0
#endif

namespace {

#if defined(__AVX512F__)
constexpr int VL = 16, MR = 12;  // floats per vector; rows of a tile: 24 of 32 registers hold sums
#elif defined(__AVX__)
constexpr int VL = 8, MR = 6;  // 12 of 16 registers
#else
constexpr int VL = 4, MR = 6;
#endif
constexpr int NR = 2 * VL;    // columns of a panel
constexpr int WORDS = 256;       // of 32 bits, of a row of A in one pass: what they multiply of a panel stays in the L1 cache
constexpr int LDA = WORDS + 16;  // row stride of A in words: no power of two, or all rows fall into one cache set
constexpr int AMX_ROWS = 16, AMX_UNITS = 16;  // of a tile register
constexpr int MOST_ROWS = HAS_AMX ? 2 * AMX_ROWS : MR;
// How far ahead a tile that has its panel for itself fetches it, in units: AHEAD, or with tile registers AHEAD_OF_TILES
// into the L2 cache and NEAR into the L1. On an Intel Xeon (Sapphire Rapids), tile registers get up to a half more bytes
// a second so than with a whole pass, other products a tenth more; on an AMD EPYC only a whole pass was measured.
constexpr int AHEAD = HAS_AMX ? 2048 : WORDS * NR, AHEAD_OF_TILES = 1024, NEAR = 512;
constexpr float INF = INFINITY, LOG2E = 1.44269504f;

int threads = 1;

typedef float vec __attribute__((vector_size(VL * 4)));
typedef int32_t ivec __attribute__((vector_size(VL * 4)));
typedef uint16_t hvec __attribute__((vector_size(VL * 2)));

template <class V> inline V load(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V> inline void store(void* p, V v) { std::memcpy(p, &v, sizeof v); }
inline vec splat(float x) { return vec{} + x; }
inline vec maximum(vec a, vec b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline float sum_of(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(v);
#else
    float s = 0;
    for (int i = 0; i < VL; ++i) s += v[i];
    return s;
#endif
}

inline float max_of(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(v);
#else
    float m = v[0];
    for (int i = 1; i < VL; ++i) m = std::max(m, v[i]);
    return m;
#endif
}

// 2^x, to about one unit in the last place; -inf gives 0, and what is no number stays none
inline vec exp2v(vec x) {
#if defined(__AVX512F__)
    vec n = _mm512_roundscale_ps(x, 0);
#else
    const ivec vanishes = x < -126.0f;
    x = x < -126.0f ? splat(-126.0f) : x;  // so written that what is no number passes: then p is none either
    x = x > 127.0f ? splat(127.0f) : x;
    vec n = (x + 12582912.0f) - 12582912.0f;  // rounds: the sum has no bits left for a fraction
#endif
    vec r = x - n, p = splat(1.54035304e-4f);
    for (float c : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f}) p = p * r + c;
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, n);
#else
    return vanishes ? vec{} : (vec)((ivec)p + (__builtin_convertvector(n, ivec) << 23));
#endif
}

inline vec silu(vec x) { return x / (1.0f + exp2v(x * -LOG2E)); }
inline vec tanhv(vec x) { return 1.0f - 2.0f / (1.0f + exp2v(x * (2 * LOG2E))); }
inline vec gelu_tanh(vec x) { return x / (1.0f + exp2v(x * (1.0f + 0.044715f * x * x) * (-2 * 0.79788456f * LOG2E))); }
inline vec gelu(vec x) {  // by erfc, to a relative 1.2e-7 (Numerical Recipes, Chebyshev fit)
    const vec z = (x < 0.0f ? -x : x) * 0.70710678f, t = 1.0f / (1.0f + 0.5f * z);
    vec p = splat(0.17087277f);
    for (float c : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f, 0.37409196f, 1.00002368f, -1.26551223f})
        p = p * t + c;
    const vec tail = 0.5f * t * exp2v((p - z * z) * LOG2E);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}
inline vec relu(vec x) { return x < 0.0f ? vec{} : x; }

// What a number format defines: PER_UNIT elements and PARTS words of A for a unit, KC units in a pass; `part` of a unit
// of B, and `mul_add` of it and a word of A; `Operand`, an element as A has it; `rounded`, what `write` would keep.
struct Float32 {
    using Element = float;
    using Operand = float;
    static constexpr int PER_UNIT = 1, PARTS = 1, KC = WORDS;
    static ivec part(ivec b, int) { return b; }
    static vec mul_add(vec sum, ivec a, ivec b) { return (vec)a * (vec)b + sum; }
    static vec read(const float* p) { return load<vec>(p); }
    static void write(float* p, vec v) { store(p, v); }
    static void write_operand(float* p, vec v) { store(p, v); }
    static vec rounded(vec v) { return v; }
};

#if defined(__AVX512BF16__) || HAS_AMX
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

struct BFloat16 {
    using Element = uint16_t;
    using Operand = std::conditional_t<HAS_PAIRS, uint16_t, float>;
    static constexpr int PER_UNIT = 2, PARTS = HAS_PAIRS ? 1 : 2, KC = WORDS / PARTS, HIGH = int32_t(0xffff0000);
    static ivec part(ivec b, int number) { return HAS_PAIRS ? b : number ? b & HIGH : b << 16; }
    static vec mul_add(vec sum, ivec a, ivec b) {
#if defined(__AVX512BF16__)
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#elif HAS_PAIRS  // what tile registers, emulated, leave over
        return (vec)(b & HIGH) * (vec)(a & HIGH) + ((vec)(b << 16) * (vec)(a << 16) + sum);
#else
        return (vec)a * (vec)b + sum;
#endif
    }
    static vec read(const uint16_t* p) { return (vec)(__builtin_convertvector(load<hvec>(p), ivec) << 16); }
    static void write(uint16_t* p, vec v) {
#if defined(__AVX512BF16__)
        store(p, _mm512_cvtneps_pbh(v));
#else
        store(p, __builtin_convertvector((ivec)rounded(v) >> 16, hvec));
#endif
    }
    static void write_operand(uint16_t* p, vec v) { write(p, v); }
    static void write_operand(float* p, vec v) { store(p, rounded(v)); }
    static vec rounded(vec v) {
#if defined(__AVX512BF16__)
        return (vec)(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)) << 16);
#else
        const ivec bits = (ivec)v;
        // To nearest, ties to even; of what is no number rounding could make one.
        return (vec)((v == v ? bits + (0x7fff + ((bits >> 16) & 1)) : bits | 0x400000) & HIGH);
#endif
    }
};

// adds the product of a unit of A and one of B
template <class T> inline vec mul_add_unit(vec sum, const int32_t* a, ivec b) {
#pragma GCC unroll 2
    for (int part = 0; part < T::PARTS; ++part) sum = T::mul_add(sum, ivec{} + a[part], T::part(b, part));
    return sum;
}

// the first `count` (at most VL) elements; the others read as 0 and are not written
template <class T> inline vec read_part(const typename T::Element* p, int64_t count) {
    if (count >= VL) return T::read(p);
    typename T::Element all[VL] = {};
    std::memcpy(all, p, count * sizeof *p);
    return T::read(all);
}
template <class T> inline void write_part(typename T::Element* p, vec v, int64_t count) {
    if (count >= VL) return T::write(p, v);
    typename T::Element all[VL];
    T::write(all, v);
    std::memcpy(p, all, count * sizeof *p);
}

// `units` units of a panel of B, a row for each of their parts
template <class T> inline void widen(const int32_t* b, int64_t units, int32_t* wide) {
    for (int64_t k = 0; k < units; ++k)
        for (int part = 0; part < T::PARTS; ++part)
            for (int h = 0; h < 2; ++h)
                store(wide + (k * T::PARTS + part) * NR + h * VL, T::part(load<ivec>(b + k * NR + h * VL), part));
}

struct Product {
    const int32_t* a;  // [ROWS][units][PARTS], rows LDA apart
    const int32_t* b;  // [units][NR]
    int64_t units;
    float* c;  // [ROWS][NR], rows c_stride apart
    int64_t c_stride;
    bool accumulate;              // or overwrite c
    const int32_t* next = nullptr;  // memory to fetch meanwhile, next_step units of it for each unit of depth
    int64_t next_step = 0;
};

// Where there is AMX: into the L2 cache, as the L1 has no room for what other tiles wait for
inline void fetch_weight(const int32_t* line) { __builtin_prefetch(line, 0, HAS_AMX ? 2 : 3); }

// c (+)= a * b. Without fetching ahead, waiting for memory and computing would take turns: that costs up to half of
// the time of a linear layer at 8 to 32 rows.
template <class T, int ROWS> void multiply(Product p) {
    vec sum[ROWS][2];
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) sum[r][h] = p.accumulate ? load<vec>(p.c + r * p.c_stride + h * VL) : vec{};
    for (int64_t k = 0; k < p.units; ++k) {
        const ivec b0 = load<ivec>(p.b + k * NR), b1 = load<ivec>(p.b + k * NR + VL);
        fetch_weight(p.next + k * p.next_step);
        fetch_weight(p.next + k * p.next_step + p.next_step / 2);
#pragma GCC unroll 2
        for (int part = 0; part < T::PARTS; ++part) {
            const ivec c0 = T::part(b0, part), c1 = T::part(b1, part);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) {
                const ivec a = ivec{} + p.a[r * LDA + k * T::PARTS + part];
                sum[r][0] = T::mul_add(sum[r][0], a, c0);
                sum[r][1] = T::mul_add(sum[r][1], a, c1);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) store(p.c + r * p.c_stride + h * VL, sum[r][h]);
}

using Multiply = void (*)(Product);
template <class T, int... I> Multiply multiply_of(int64_t rows, std::integer_sequence<int, I...>) {
    static constexpr Multiply table[] = {multiply<T, I + 1>...};
    return table[rows - 1];
}
template <class T> Multiply multiply_for(int64_t rows) { return multiply_of<T>(rows, std::make_integer_sequence<int, MR>{}); }

#if HAS_AMX
// Linux gives a process the tile registers when it asks for them.
inline bool may_use_amx() {
#if defined(EMULATE_AMX)
    return true;
#else
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
#endif
}

// The calling thread's tile registers, all of 16 rows of 64 bytes, until this is gone; others in the thread use them too.
struct TileRegisters {
    const bool used;
    explicit TileRegisters(bool use) : used(use) {
        if (!used) return;
        struct alignas(64) { uint8_t palette, start_row, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } all{};
        all.palette = 1;
        for (int i = 0; i < 8; ++i) all.bytes[i] = 64, all.rows[i] = AMX_ROWS;
        _tile_loadconfig(&all);
    }
    ~TileRegisters() { if (used) _tile_release(); }
};

// what the instructions read and write is unknown to the compiler
inline void memory_barrier() { asm volatile("" ::: "memory"); }

// as `multiply`, of PAIRS times 16 rows and a multiple of 16 units
template <int PAIRS> void multiply_amx(const Product& p) {
    constexpr int64_t A = LDA * 4, B = NR * 4;
    const int64_t C = p.c_stride * 4;
    const bool alone = p.next_step == NR;
    float* below = p.c + AMX_ROWS * p.c_stride;
    memory_barrier();
    if (p.accumulate) {
        _tile_loadd(0, p.c, C);
        _tile_loadd(1, p.c + VL, C);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    if constexpr (PAIRS == 2) {
        if (p.accumulate) {
            _tile_loadd(2, below, C);
            _tile_loadd(3, below + VL, C);
        } else {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int64_t k = 0; k < p.units; k += AMX_UNITS) {
        for (int64_t line = 0; line < p.next_step; ++line) {
            fetch_weight(p.next + k * p.next_step + line * 16);
            if (alone) __builtin_prefetch(p.b + k * NR + NEAR + line * 16);
        }
        _tile_loadd(6, p.b + k * NR, B);
        _tile_loadd(7, p.b + k * NR + VL, B);
        _tile_loadd(4, p.a + k, A);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (PAIRS == 2) {
            _tile_loadd(5, p.a + AMX_ROWS * LDA + k, A);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, p.c, C);
    _tile_stored(1, p.c + VL, C);
    if constexpr (PAIRS == 2) {
        _tile_stored(2, below, C);
        _tile_stored(3, below + VL, C);
    }
    memory_barrier();
}
#else
inline bool may_use_amx() { return false; }
struct TileRegisters { explicit TileRegisters(bool) {} };
#endif

template <class T> bool uses_amx() { return T::PER_UNIT == 2 && may_use_amx(); }

// `multiply` of up to MOST_ROWS rows. With `amx`, which needs `TileRegisters`, it takes 16 or 32: those of A behind the
// last one are read, and those of C overwritten.
template <class T> void multiply_rows(int64_t rows, Product p, bool amx) {
#if HAS_AMX
    if (amx) {
        Product whole = p;
        whole.units = p.units / AMX_UNITS * AMX_UNITS;
        if (whole.units) rows > AMX_ROWS ? multiply_amx<2>(whole) : multiply_amx<1>(whole);
        if (whole.units == p.units) return;
        p.a += whole.units, p.b += whole.units * NR, p.units -= whole.units;
        p.accumulate = p.accumulate || whole.units;
        p.next += whole.units * p.next_step;
    }
#endif
    for (; rows > MR; rows -= MR) {
        multiply_for<T>(MR)(p);
        p.a += MR * LDA, p.c += MR * p.c_stride;
    }
    multiply_for<T>(rows)(p);
}

// `rows` rows as tiles of nearly equal height: 32 rows are 11 + 11 + 10, not 12 + 12 + 8. Those of AMX are full, but
// for the last.
struct Tiles {
    int64_t rows;
    bool amx;
    int64_t count = ceil_div(rows, amx ? MOST_ROWS : MR);
    int64_t start(int64_t tile) const { return amx ? std::min(rows, tile * MOST_ROWS) : rows * tile / count; }
    int64_t height(int64_t tile) const { return start(tile + 1) - start(tile); }
};

// one row of `count` elements, from unit `first` on, as `units` units of A
template <class T> void pack_row(const typename T::Element* row, int64_t count, int64_t first, int64_t units, int32_t* target) {
    const int64_t left = std::min(count - first * T::PER_UNIT, units * T::PER_UNIT);
    target[units * T::PARTS - 1] = 0;  // its second half may lie behind the end
    row += first * T::PER_UNIT;
    if constexpr (T::PARTS == 1)
        std::memcpy(target, row, left * sizeof *row);
    else
        for (int64_t i = 0; i < left; i += VL)
            write_part<Float32>(reinterpret_cast<float*>(target) + i, read_part<T>(row + i, left - i), left - i);
}

// scratch memory that a thread keeps, from the beginning of a cache line
template <class E> E* scratch(std::vector<E>& buffer, int64_t size) {
    constexpr int64_t LINE = 64;
    if (int64_t(buffer.size()) < size + LINE) buffer.resize(size + LINE);
    return reinterpret_cast<E*>(ceil_div(reinterpret_cast<int64_t>(buffer.data()), LINE) * LINE);
}

}  // namespace
