// Attention over a paged KV cache, for prefill and decode alike.
//
// The work is cut into shares: some query rows of one KV head of one sequence, against all keys they see. A row is a
// (token, head) pair, heads innermost, so that all heads of a KV head use its keys while they are near. A share takes
// its keys in rounds: it packs their KV for the register tile and updates an online softmax (Milakov and Gimelshein,
// 2018; FlashAttention). Packing is repaid by many rows in prefill; in decode, memory is the limit, not packing: there
// the shares of a sequence's KV heads take each round in turn, since a block's heads lie one behind the other.
#pragma once
#include "tile.h"

extern "C" {

struct AttentionCall {
    const void *query, *cache;
    void* out;  // [tokens][heads][value_dim]
    const int32_t *query_starts, *context_lens, *block_tables;
    const float* sinks;  // [heads] or null
    int64_t num_sequences, table_stride, query_token_stride, query_head_stride, block_stride, head_stride;
    int64_t heads, kv_heads, key_dim, value_dim, block_size, causal, window;  // window 0: none
    float scale, softcap;                                                     // softcap 0: none
};
}

namespace {

constexpr int KEYS = 128;        // keys of a round
constexpr int SHARE_ROWS = 192;  // query rows of a share
constexpr int FEW_ROWS = 12;     // up to so many, packing costs more than it saves

static_assert(KEYS <= LDA);  // a row of weights; Python lets no longer key through than KC units

// exchanges the lanes with bit S of `a` for those without it of `b`
template <int S, class V> inline void exchange(V& a, V& b) {
    ivec low{}, high{};
    for (int lane = 0; lane < VL; ++lane) {
        low[lane] = lane & S ? VL + lane - S : lane;
        high[lane] = lane & S ? VL + lane : lane + S;
    }
    const V first = a;
    a = __builtin_shuffle(first, b, low);
    b = __builtin_shuffle(first, b, high);
}

template <int S> inline void transpose_step(ivec* rows) {
    for (int i = 0; i < VL; ++i)
        if (!(i & S)) exchange<S>(rows[i], rows[i + S]);
}

inline void transpose(ivec* rows) {
    transpose_step<1>(rows);
    transpose_step<2>(rows);
    if constexpr (VL > 4) transpose_step<4>(rows);
    if constexpr (VL > 8) transpose_step<8>(rows);
}

// the sum of each of VL vectors, in the lane of its number
template <int S = 1> inline vec sum_each(vec* v) {
    if constexpr (S == VL) {
        return v[0];
    } else {
        for (int i = 0; i < VL / S; i += 2) {
            exchange<S>(v[i], v[i + 1]);
            v[i / 2] = v[i] + v[i + 1];
        }
        return sum_each<S * 2>(v);
    }
}

// two rows of 2 VL bfloat16 -> VL pairs from their first half, VL from the second
inline void interleave(ivec a, ivec b, ivec* pairs) {
    typedef uint16_t halves __attribute__((vector_size(VL * 4)));
    halves low{}, high{};
    for (int i = 0; i < VL * 2; ++i) {
        low[i] = i / 2 + i % 2 * VL * 2;
        high[i] = low[i] + VL;
    }
    pairs[0] = (ivec)__builtin_shuffle((halves)a, (halves)b, low);
    pairs[1] = (ivec)__builtin_shuffle((halves)a, (halves)b, high);
}

struct Share {
    int64_t sequence, kv_head, first_token, num_tokens;
    int64_t first_position;     // of its first token
    int64_t first_key, end_key;  // what its tokens see, together
};

// Shares that take each round in turn: all of the same keys.
struct Group {
    const Share *begin, *end;
};

// Keys that are taken together, and where their KV lies. All KEYS rows may be read: behind the last key they repeat.
template <class Element> struct Round {
    const Share* share = nullptr;
    int64_t first = 0, count = 0;
    const Element *keys[KEYS], *values[KEYS];
};

template <class T> struct Attention {
    using Element = typename T::Element;
    using Round = ::Round<Element>;
    const AttentionCall& call;
    const Share* const last;  // behind all shares
    const int64_t heads_each = call.heads / call.kv_heads;  // of a KV head
    const int64_t key_units = ceil_div(call.key_dim, T::PER_UNIT), value_width = ceil_div(call.value_dim, NR) * NR;
    const int block_shift = __builtin_ctzll(call.block_size);
    const float to_log2 = LOG2E * (call.softcap > 0 ? 1 : call.scale);
    // of the share that has its turn: [rows][LDA], a round's packed KV, and [rows][value_width], [rows], [rows]
    const Share* share = nullptr;
    int32_t *queries = nullptr, *keys = nullptr, *values = nullptr;
    float *sums = nullptr, *maxima = nullptr, *totals = nullptr;
    Round rounds[2];  // the present one and the one that follows
    alignas(64) float scores[MOST_ROWS * KEYS];
    alignas(64) int32_t weights[MOST_ROWS * LDA];
#if HAS_AMX
    static constexpr int TILE_ROWS = AMX_ROWS / 2;  // rows of weights in a tile, each there twice
    alignas(64) float turned[KEYS * AMX_ROWS], found[2 * AMX_ROWS * VL];
    const Element* tiles[KEYS / AMX_ROWS];
#endif
    const bool amx = uses_amx<T>();

    // which keys a row sees: lowest(row) <= key < behind(row)
    int64_t position(int64_t row) const { return share->first_position + row / heads_each; }
    int64_t lowest(int64_t row) const { return call.window ? std::max<int64_t>(0, position(row) - call.window + 1) : 0; }
    int64_t behind(int64_t row) const { return call.causal ? position(row) + 1 : call.context_lens[share->sequence]; }

    int64_t token_of(int64_t row) const { return call.query_starts[share->sequence] + share->first_token + row / heads_each; }
    int64_t head_of(int64_t row) const { return share->kv_head * heads_each + row % heads_each; }

    void find(const Share* owner, int64_t first, Round& round) const {
        round.share = owner, round.first = first, round.count = std::min<int64_t>(KEYS, owner->end_key - first);
        const int32_t* table = call.block_tables + owner->sequence * call.table_stride;
        int64_t i = 0;
        while (i < round.count) {
            const int64_t key = first + i, offset = key & (call.block_size - 1);
            const auto* block = static_cast<const Element*>(call.cache) + table[key >> block_shift] * call.block_stride +
                                owner->kv_head * call.head_stride;
            const Element *k = block + offset * call.key_dim, *v = block + call.block_size * call.key_dim + offset * call.value_dim;
            for (const int64_t end = std::min(i + call.block_size - offset, round.count); i < end; ++i) {
                round.keys[i] = k, round.values[i] = v;
                k += call.key_dim, v += call.value_dim;
            }
        }
        for (; i < KEYS; ++i) round.keys[i] = round.keys[i - 1], round.values[i] = round.values[i - 1];
    }
    // Blocks lie anywhere in memory, so the hardware cannot foresee what comes next: while a round is worked on, the
    // one that follows, be it of the next share, is fetched row by row: into the L2 cache, as the L1 has no room for two.
    void find_next(const Group& group, const Round& round, Round& next) const {
        const Share* owner = round.share + 1;
        int64_t first = round.first;
        if (owner == group.end) owner = group.begin, first += KEYS;
        if (first >= owner->end_key) owner = group.end, first = owner == last ? 0 : owner->first_key;
        if (owner == last)
            next = round;
        else
            find(owner, first, next);
    }
    static void fetch(const Element* row, int64_t dim) {
        for (int64_t i = 0; i < dim; i += 64 / sizeof(Element)) __builtin_prefetch(row + i, 0, 2);
    }

    // Have this share's turn: the next ones work on its rows.
    void enter(const Group& group, const Share* one, int64_t rows) {
        static thread_local std::vector<int32_t> units;
        static thread_local std::vector<float> floats;
        const int64_t in_units = rows * LDA + KEYS * key_units + KEYS * value_width + 2 * NR * VL;
        const int64_t in_floats = rows * value_width + ceil_div(2 * rows, VL) * VL;
        share = one;
        queries = scratch(units, in_units * (group.end - group.begin)) + in_units * (one - group.begin);
        keys = queries + rows * LDA, values = keys + KEYS * key_units;
        sums = scratch(floats, in_floats * (group.end - group.begin)) + in_floats * (one - group.begin);
        maxima = sums + rows * value_width, totals = maxima + rows;
    }
    void set_up(int64_t rows) {
        std::fill(sums, maxima, 0.0f);
        for (int64_t row = 0; row < rows; ++row) {
            const auto* query = static_cast<const Element*>(call.query) + token_of(row) * call.query_token_stride +
                                head_of(row) * call.query_head_stride;
            pack_row<T>(query, call.key_dim, 0, key_units, queries + row * LDA);
            // a sink is one more logit in the softmax that brings no value
            maxima[row] = call.sinks ? call.sinks[head_of(row)] * LOG2E : -INF;
            totals[row] = call.sinks ? 1.0f : 0.0f;
        }
#if HAS_AMX
        if (takes_tiles(rows)) turn_queries(rows);
#endif
    }

    // ---- few rows: KV is read once, where it lies ----

    // scores of ROWS rows from `top` on: products lane by lane, then VL keys' lanes are summed together
    template <int ROWS> void score(int64_t top, const Round& round, const Round& next) {
        for (int64_t key = 0; key < round.count; key += VL) {
            vec products[ROWS][VL];
            for (int i = 0; i < VL; i += 4) {
                const Element* const* source = round.keys + key + i;
                for (int j = 0; j < 4; ++j) fetch(next.keys[key + i + j], call.key_dim);
                vec sum[ROWS][4] = {};
                for (int64_t unit = 0; unit < key_units; unit += VL)
                    for (int r = 0; r < ROWS; ++r)
                        for (int j = 0; j < 4; ++j)
                            sum[r][j] = T::mul_add(sum[r][j], load<ivec>(queries + (top + r) * LDA + unit),
                                                   load<ivec>(source[j] + unit * T::PER_UNIT));
                for (int r = 0; r < ROWS; ++r)
                    for (int j = 0; j < 4; ++j) products[r][i + j] = sum[r][j];
            }
            for (int r = 0; r < ROWS; ++r) store(scores + r * KEYS + key, sum_each(products[r]));
        }
    }

    // adds the weighted values of a round to the sums of ROWS rows from `top` on
    template <int ROWS> void add_values(int64_t top, const Round& round, const Round& next) {
        for (int64_t column = 0; column < call.value_dim; column += NR) {
            vec sum[ROWS][2];
            for (int r = 0; r < ROWS; ++r)
                for (int h = 0; h < 2; ++h) sum[r][h] = load<vec>(sums + (top + r) * value_width + column + h * VL);
            for (int64_t key = 0; key < round.count; key += T::PER_UNIT) {
                const Element* row = round.values[key] + column;
                ivec v[2] = {load<ivec>(row), T::PER_UNIT == 1 ? load<ivec>(row + VL) : ivec{}};
                if constexpr (T::PER_UNIT == 2) interleave(v[0], load<ivec>(round.values[key + 1] + column), v);
                for (int i = 0; i < T::PER_UNIT; ++i) fetch(next.values[key + i] + column, NR);
                for (int r = 0; r < ROWS; ++r)
                    for (int h = 0; h < 2; ++h)
                        sum[r][h] = T::mul_add(sum[r][h], ivec{} + weights[r * LDA + key / T::PER_UNIT], v[h]);
            }
            for (int r = 0; r < ROWS; ++r)
                for (int h = 0; h < 2; ++h) store(sums + (top + r) * value_width + column + h * VL, sum[r][h]);
        }
    }

    template <int ROWS> void attend_directly(int64_t top, const Round& round, const Round& next) {
        score<ROWS>(top, round, next);
        for (int r = 0; r < ROWS; ++r)
            soften(top + r, round.first, ceil_div(round.count, NR) * NR, scores + r * KEYS, reinterpret_cast<Element*>(weights + r * LDA));
        add_values<ROWS>(top, round, next);
    }

#if HAS_AMX
    // ---- few rows, where there are tile registers: 16 keys, or values, are a tile as they lie in the cache ----

    // where tiles of the cache are whole: 16 tokens of one block, 32 elements of each
    bool takes_tiles(int64_t rows) const {
        return amx && rows <= AMX_ROWS && call.block_size % AMX_ROWS == 0 && call.key_dim % (2 * AMX_UNITS) == 0 &&
               call.value_dim % (2 * AMX_UNITS) == 0;
    }

    // queries, a row each -> a column each, in the place of packed keys
    void turn_queries(int64_t rows) {
        std::fill(keys, keys + key_units * AMX_ROWS, 0);
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t unit = 0; unit < key_units; ++unit) keys[unit * AMX_ROWS + row] = queries[row * LDA + unit];
    }

    // The tiles of a round's values. The last is copied, with zeros behind the last key, to the place of packed values:
    // what lies there in the cache is anything, and a weight of 0 does not help where it is not a number.
    void find_values(const Round& round) {
        for (int64_t key = 0; key < round.count; key += AMX_ROWS) tiles[key / AMX_ROWS] = round.values[key];
        const int64_t left = round.count % AMX_ROWS, size = left * call.value_dim;
        if (left == 0) return;
        auto* whole = reinterpret_cast<Element*>(values);
        std::memcpy(whole, round.values[round.count - left], size * sizeof(Element));
        std::fill(whole + size, whole + AMX_ROWS * call.value_dim, Element{});
        tiles[round.count / AMX_ROWS] = whole;
    }

    // keys times queries: [key][row]
    void score_tiles(const Round& round, const Round& next) {
        memory_barrier();
        for (int64_t key = 0; key < round.count; key += AMX_ROWS) {
            for (int i = 0; i < AMX_ROWS; ++i) fetch(next.keys[key + i], call.key_dim);
            _tile_zero(0);
            for (int64_t unit = 0; unit < key_units; unit += AMX_UNITS) {
                _tile_loadd(4, round.keys[key] + unit * T::PER_UNIT, call.key_dim * sizeof(Element));
                _tile_loadd(6, keys + unit * AMX_ROWS, AMX_ROWS * 4);
                _tile_dpbf16ps(0, 4, 6);
            }
            _tile_stored(0, turned + key * AMX_ROWS, AMX_ROWS * 4);
        }
        memory_barrier();
    }

    // Adds the weighted values of a round to the sums of `height` rows from `top` on. A unit of a row of values is two
    // elements of one key, not of two: so each row of weights is there twice, as (w, 0), which takes the first element of
    // every unit, and as (0, w), which takes the second.
    void add_value_tiles(int64_t top, int64_t height, const Round& round, const Round& next) {
        const int64_t A = LDA * 4, B = call.value_dim * sizeof(Element);
        for (int64_t column = 0; column < call.value_dim; column += NR) {
            memory_barrier();
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t key = 0; key < round.count; key += 2 * AMX_ROWS) {  // two sums, as one has to wait for the last
                if (column == 0)  // whole rows at once: memory is faster in the order in which it lies
                    for (int i = 0; i < 2 * AMX_ROWS; ++i) fetch(next.values[key + i], call.value_dim);
                _tile_loadd(4, weights + key, A);
                _tile_loadd(6, tiles[key / AMX_ROWS] + column, B);
                _tile_dpbf16ps(0, 4, 6);
                if (key + AMX_ROWS >= round.count) break;
                _tile_loadd(5, weights + key + AMX_ROWS, A);
                _tile_loadd(7, tiles[key / AMX_ROWS + 1] + column, B);
                _tile_dpbf16ps(1, 5, 7);
            }
            _tile_stored(0, found, AMX_ROWS * 4);
            _tile_stored(1, found + AMX_ROWS * VL, AMX_ROWS * 4);
            memory_barrier();
            const auto sum_at = [this](int64_t row) { return load<vec>(found + row * VL) + load<vec>(found + (AMX_ROWS + row) * VL); };
            for (int64_t r = 0; r < height; ++r) {
                float* sum = sums + (top + r) * value_width + column;
                const vec first = sum_at(r), second = sum_at(TILE_ROWS + r);
                ivec low{}, high{};
                for (int i = 0; i < VL; ++i) low[i] = i / 2 + i % 2 * VL, high[i] = low[i] + VL / 2;
                store(sum, load<vec>(sum) + __builtin_shuffle(first, second, low));
                store(sum + VL, load<vec>(sum + VL) + __builtin_shuffle(first, second, high));
            }
        }
    }

    void attend_tiles(int64_t rows, const Round& round, const Round& next) {
        score_tiles(round, next);
        find_values(round);
        const int64_t width = ceil_div(round.count, AMX_ROWS) * AMX_ROWS;
        ivec line;
        for (int i = 0; i < VL; ++i) line[i] = i * AMX_ROWS;
        for (int64_t top = 0; top < rows; top += TILE_ROWS) {
            const int64_t height = std::min<int64_t>(TILE_ROWS, rows - top);
            for (int64_t r = 0; r < height; ++r) {
                alignas(64) Element packed[KEYS];
                for (int64_t key = 0; key < width; key += VL)
                    store(scores + key, (vec)_mm512_i32gather_ps((__m512i)line, turned + key * AMX_ROWS + top + r, 4));
                soften(top + r, round.first, width, scores, packed);
                for (int64_t key = 0; key < width; key += VL) {
                    const ivec first = __builtin_convertvector(load<hvec>(packed + key), ivec);
                    store(weights + r * LDA + key, first);
                    store(weights + (TILE_ROWS + r) * LDA + key, first << 16);
                }
            }
            add_value_tiles(top, height, round, next);
        }
    }
#endif

    void attend_few(int64_t rows, const Round& round, const Round& next) {
        for (; rows >= 4; rows -= 4) attend_directly<4>(rows - 4, round, next);
        if (rows == 3) attend_directly<3>(0, round, next);
        if (rows == 2) attend_directly<2>(0, round, next);
        if (rows == 1) attend_directly<1>(0, round, next);
    }

    // ---- many rows: KV is packed for the register tile ----

    // keys of a round -> [panels][key_units][NR]
    void pack_keys(const Round& round, const Round& next) {
        for (int64_t key = 0; key < ceil_div(round.count, NR) * NR; key += VL) {
            int32_t* target = keys + key / NR * NR * key_units + key % NR;
            for (int i = 0; i < VL; ++i) fetch(next.keys[key + i], call.key_dim);
            for (int64_t unit = 0; unit < key_units; unit += VL) {
                ivec rows[VL];
                for (int i = 0; i < VL; ++i) rows[i] = units_of(round.keys[key + i], unit);
                transpose(rows);
                const int64_t left = std::min<int64_t>(VL, key_units - unit);
                for (int i = 0; i < left; ++i) store(target + (unit + i) * NR, rows[i]);
            }
        }
    }
    ivec units_of(const Element* row, int64_t unit) const {
        const int64_t left = call.key_dim - unit * T::PER_UNIT;
        if (left >= VL * T::PER_UNIT) return load<ivec>(row + unit * T::PER_UNIT);
        ivec all{};
        std::memcpy(&all, row + unit * T::PER_UNIT, left * sizeof(Element));
        return all;
    }

    // values of a round -> [value panels][units][NR]
    void pack_values(const Round& round, const Round& next) {
        const int64_t units = ceil_div(round.count, NR) * NR / T::PER_UNIT;
        for (int64_t unit = 0; unit < units; ++unit) {
            const Element* const* rows = round.values + unit * T::PER_UNIT;
            for (int i = 0; i < T::PER_UNIT; ++i) fetch(next.values[unit * T::PER_UNIT + i], call.value_dim);
            for (int64_t column = 0; column < call.value_dim; column += VL) {
                ivec v = (ivec)read_part<T>(rows[0] + column, call.value_dim - column);
                if constexpr (T::PER_UNIT == 2)
                    v = ((v >> 16) & 0xffff) | (ivec)read_part<T>(rows[1] + column, call.value_dim - column);
                store(values + (column / NR * units + unit) * NR + column % NR, v);
            }
        }
    }

    // one row's scores of a round -> base-2 logits, keys out of sight at -inf; returns the highest
    float to_logits(int64_t row, int64_t first, int64_t width, float* score) const {
        const int64_t low = lowest(row) - first, high = behind(row) - first;
        ivec lane;
        for (int i = 0; i < VL; ++i) lane[i] = i;
        vec top = splat(-INF);
        for (int64_t j = 0; j < width; j += VL) {
            vec s = load<vec>(score + j);
            if (call.softcap > 0) s = tanhv(s * (call.scale / call.softcap)) * call.softcap;
            s *= to_log2;
            if (j < low || j + VL > high) s = (lane >= int32_t(low - j)) & (lane < int32_t(high - j)) ? s : splat(-INF);
            store(score + j, s);
            top = maximum(top, s);
        }
        return max_of(top);
    }

    // one row's scores -> weights of the values, while what was summed so far is scaled to the new maximum
    void soften(int64_t row, int64_t first, int64_t width, float* score, Element* weight) {
        const float before = maxima[row], now = std::max(before, to_logits(row, first, width, score));
        const float base = now == -INF ? 0 : now, fade = now == before ? 1 : std::exp2(before - base);
        vec total{};
        for (int64_t j = 0; j < width; j += VL) {
            const vec p = exp2v(load<vec>(score + j) - base);
            total += p;
            T::write(weight + j, p);
        }
        maxima[row] = now;
        totals[row] = totals[row] * fade + sum_of(total);
        float* sum = sums + row * value_width;
        if (fade != 1)
            for (int64_t j = 0; j < value_width; j += VL) store(sum + j, load<vec>(sum + j) * fade);
    }

    // rows `top` to `top + height` against a round
    void attend(int64_t top, int64_t height, const Round& round) {
        const int64_t seen = behind(top + height - 1) - round.first;
        if (seen <= 0 || lowest(top) >= round.first + round.count) return;
        const int64_t padded = ceil_div(round.count, NR) * NR, width = std::min(ceil_div(seen, NR) * NR, padded);
        const auto multiply = [=](const Product& product) {  // what is behind the last row is not to be overwritten
            multiply_rows<T>(height, product, amx && height % AMX_ROWS == 0);
        };
        for (int64_t key = 0; key < width; key += NR)
            multiply({queries + top * LDA, keys + key * key_units, key_units, scores + key, KEYS, false});
        for (int64_t i = 0; i < height; ++i)
            soften(top + i, round.first, width, scores + i * KEYS, reinterpret_cast<Element*>(weights + i * LDA));
        for (int64_t column = 0; column < value_width; column += NR)
            multiply({weights, values + column * padded / T::PER_UNIT, width / T::PER_UNIT, sums + top * value_width + column,
                      value_width, true});
    }

    void attend_many(const Tiles& tiles, const Round& round, const Round& next) {
        pack_keys(round, next);
        pack_values(round, next);
        for (int64_t tile = 0; tile < tiles.count; ++tile) attend(tiles.start(tile), tiles.height(tile), round);
    }

    void write_row(int64_t row) const {
        auto* out = static_cast<Element*>(call.out) + (token_of(row) * call.heads + head_of(row)) * call.value_dim;
        const float factor = totals[row] > 0 ? 1 / totals[row] : 0;
        for (int64_t j = 0; j < call.value_dim; j += VL)
            write_part<T>(out + j, load<vec>(sums + row * value_width + j) * factor, call.value_dim - j);
    }

    void attend_round(const Tiles& tiles, const Round& round, const Round& next) {
#if HAS_AMX
        if (takes_tiles(tiles.rows)) return attend_tiles(tiles.rows, round, next);
#endif
        // whole vectors only: others need the padding of the packed form
        const bool whole = call.key_dim % (VL * T::PER_UNIT) == 0 && call.value_dim % NR == 0;
        tiles.rows <= FEW_ROWS && whole ? attend_few(tiles.rows, round, next) : attend_many(tiles, round, next);
    }

    void run(const Group& group) {
        const Tiles tiles{group.begin->num_tokens * heads_each, amx};
        const auto each_share = [&](auto work) {
            for (const Share* one = group.begin; one < group.end; ++one) {
                enter(group, one, tiles.rows);
                work();
            }
        };
        each_share([&] { set_up(tiles.rows); });
        find(group.begin, group.begin->first_key, rounds[0]);
        for (int64_t first = group.begin->first_key; first < group.begin->end_key; first += KEYS)
            each_share([&] {
                find_next(group, rounds[0], rounds[1]);
                attend_round(tiles, rounds[0], rounds[1]);
                std::swap(rounds[0], rounds[1]);
            });
        each_share([&] {
            for (int64_t row = 0; row < tiles.rows; ++row) write_row(row);
        });
    }
};

inline std::vector<Share> shares_of(const AttentionCall& call) {
    std::vector<Share> shares;
    const int64_t most = std::max<int64_t>(1, SHARE_ROWS / (call.heads / call.kv_heads));
    for (int64_t b = 0; b < call.num_sequences; ++b)
        for (int64_t head = 0; head < call.kv_heads; ++head) {
            const int64_t length = call.query_starts[b + 1] - call.query_starts[b], context = call.context_lens[b];
            for (int64_t first = 0; first < length; first += most) {
                const int64_t count = std::min(most, length - first), position = context - length + first;
                // from where a tile of the cache begins
                const int64_t low = call.window ? std::max<int64_t>(0, position - call.window + 1) / AMX_ROWS * AMX_ROWS : 0;
                shares.push_back({b, head, first, count, position, low, call.causal ? position + count : context});
            }
        }
    return shares;
}

// A sequence's shares go together where each KV head has one, of few rows; unless that left threads without work.
inline std::vector<Group> groups_of(const AttentionCall& call, const std::vector<Share>& shares) {
    std::vector<Group> groups;
    const Share* const last = shares.data() + shares.size();
    for (const Share* one = shares.data(); one < last; one = groups.back().end) {
        const int64_t length = call.query_starts[one->sequence + 1] - call.query_starts[one->sequence];
        const bool few = length == one->num_tokens && length * call.heads <= FEW_ROWS * call.kv_heads;
        groups.push_back({one, one + (few && call.num_sequences >= 2 * threads ? call.kv_heads : 1)});
    }
    return groups;
}

template <class T> void paged_attention(const AttentionCall& call) {
    const std::vector<Share> shares = shares_of(call);
    const std::vector<Group> groups = groups_of(call, shares);
#pragma omp parallel num_threads(threads) if (groups.size() > 1)
    {
        Attention<T> attention{call, shares.data() + shares.size()};
        const TileRegisters registers(attention.amx);
        // guided: a thread's groups follow each other, as fetching ahead supposes
#pragma omp for schedule(guided)
        for (size_t i = 0; i < groups.size(); ++i) attention.run(groups[i]);
    }
}

}  // namespace
