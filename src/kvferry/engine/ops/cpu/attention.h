// Attention over a paged KV cache, for prefill and decode alike.
//
// The work is cut into shares: some query rows of one KV head of one sequence, against all keys they see. A row is a
// (token, head) pair, heads innermost, so that all heads of a KV head use its keys while they are near. A share takes
// its keys in rounds: it packs their KV for the register tile and updates an online softmax (Milakov and Gimelshein,
// 2018; FlashAttention). Packing is repaid by many rows in prefill; in decode, memory is the limit, not packing: there
// the shares of a sequence's KV heads take each round in turn, since a block's heads lie one behind the other.
//
// A row's result is the same to the bit however many rows are beside it and whichever chunk it came in: all ways add up
// the same products in the same order, and rounds end at multiples of KEYS. Keys out of sight add zeros.
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
constexpr int FIRST_KEY = 32;    // a share's first key is a multiple of it: what a tile register takes in one step

static_assert(KEYS <= LDA);  // a row of weights; Python lets no longer key through than WORDS

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
    using Operand = typename T::Operand;
    using Packed = std::conditional_t<T::PARTS == 1, T, Float32>;  // the format of packed KV: its parts are words of their own
    using Round = ::Round<Element>;
    static constexpr int EACH = T::PER_UNIT / T::PARTS;  // elements of a word of A
    const AttentionCall& call;
    const Share* const last;  // behind all shares
    const int64_t heads_each = call.heads / call.kv_heads;  // of a KV head
    const int64_t key_units = ceil_div(call.key_dim, T::PER_UNIT), key_words = key_units * T::PARTS;
    const int64_t value_width = ceil_div(call.value_dim, NR) * NR;
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
    alignas(64) float turned[KEYS * AMX_ROWS];
#endif
    const bool amx = uses_amx<T>();

    // which keys a row sees: lowest(row) <= key < behind(row)
    int64_t position(int64_t row) const { return share->first_position + row / heads_each; }
    int64_t lowest(int64_t row) const { return call.window ? std::max<int64_t>(0, position(row) - call.window + 1) : 0; }
    int64_t behind(int64_t row) const { return call.causal ? position(row) + 1 : call.context_lens[share->sequence]; }

    int64_t token_of(int64_t row) const { return call.query_starts[share->sequence] + share->first_token + row / heads_each; }
    int64_t head_of(int64_t row) const { return share->kv_head * heads_each + row % heads_each; }

    static int64_t after(int64_t first) { return (first / KEYS + 1) * KEYS; }  // where the next round begins

    void find(const Share* owner, int64_t first, Round& round) const {
        round.share = owner, round.first = first, round.count = std::min(after(first), owner->end_key) - first;
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
        if (owner == group.end) owner = group.begin, first = after(first);
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
        const int64_t padded = amx ? ceil_div(rows, MOST_ROWS) * MOST_ROWS : rows;  // tile registers go on to there
        const int64_t in_units = padded * LDA + KEYS * key_words + KEYS * value_width + 2 * NR * VL;
        const int64_t in_floats = padded * value_width + ceil_div(2 * rows, VL) * VL;
        share = one;
        queries = scratch(units, in_units * (group.end - group.begin)) + in_units * (one - group.begin);
        keys = queries + padded * LDA, values = keys + KEYS * key_words;
        sums = scratch(floats, in_floats * (group.end - group.begin)) + in_floats * (one - group.begin);
        maxima = sums + padded * value_width, totals = maxima + rows;
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

    // scores of ROWS rows from `top` on: VL keys at once, turned so that each has a lane, as packing would turn them
    template <int ROWS> void score(int64_t top, const Round& round, const Round& next) {
        for (int64_t key = 0; key < round.count; key += VL) {
            vec sum[ROWS] = {};
            int64_t fetched = 0;
            for (int64_t unit = 0; unit < key_units; unit += VL) {
                for (; fetched * key_units < (unit + VL) * VL; ++fetched) fetch(next.keys[key + fetched], call.key_dim);
                ivec units[VL];
                for (int i = 0; i < VL; ++i) units[i] = load<ivec>(round.keys[key + i] + unit * T::PER_UNIT);
                transpose(units);
                for (int i = 0; i < VL; ++i)
                    for (int r = 0; r < ROWS; ++r)
                        sum[r] = mul_add_unit<T>(sum[r], queries + (top + r) * LDA + (unit + i) * T::PARTS, units[i]);
            }
            for (int r = 0; r < ROWS; ++r) store(scores + r * KEYS + key, sum[r]);
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
                        sum[r][h] = mul_add_unit<T>(sum[r][h], weights + r * LDA + key / EACH, v[h]);
            }
            for (int r = 0; r < ROWS; ++r)
                for (int h = 0; h < 2; ++h) store(sums + (top + r) * value_width + column + h * VL, sum[r][h]);
        }
    }

    template <int ROWS> void attend_directly(int64_t top, const Round& round, const Round& next) {
        score<ROWS>(top, round, next);
        for (int r = 0; r < ROWS; ++r)
            soften(top + r, round.first, ceil_div(round.count, NR) * NR, scores + r * KEYS, reinterpret_cast<Operand*>(weights + r * LDA));
        add_values<ROWS>(top, round, next);
    }

#if HAS_AMX
    // ---- few rows, where there are tile registers: 16 keys are a tile as they lie in the cache ----

    // where tiles of the cache are whole: 16 tokens of one block, 32 elements of each
    bool takes_tiles(int64_t rows) const {
        return amx && rows <= AMX_ROWS && call.block_size % AMX_ROWS == 0 && call.key_dim % (2 * AMX_UNITS) == 0;
    }

    // queries, a row each -> a column each, in the place of packed keys
    void turn_queries(int64_t rows) {
        std::fill(keys, keys + key_units * AMX_ROWS, 0);
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t unit = 0; unit < key_units; ++unit) keys[unit * AMX_ROWS + row] = queries[row * LDA + unit];
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

    void attend_tiles(int64_t rows, const Round& round, const Round& next) {
        score_tiles(round, next);
        pack_values(round, next);
        const int64_t width = ceil_div(round.count, NR) * NR;
        ivec line;
        for (int i = 0; i < VL; ++i) line[i] = i * AMX_ROWS;
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t key = 0; key < width; key += VL)
                store(scores + key, (vec)_mm512_i32gather_ps((__m512i)line, turned + key * AMX_ROWS + row, 4));
            soften(row, round.first, width, scores, reinterpret_cast<Operand*>(weights + row * LDA));
        }
        add_packed_values(0, rows, width, round);
    }
#endif

    void attend_few(int64_t rows, const Round& round, const Round& next) {
        for (; rows >= 4; rows -= 4) attend_directly<4>(rows - 4, round, next);
        if (rows == 3) attend_directly<3>(0, round, next);
        if (rows == 2) attend_directly<2>(0, round, next);
        if (rows == 1) attend_directly<1>(0, round, next);
    }

    // ---- many rows: KV is packed for the register tile ----

    // keys of a round -> [panels][key_words][NR]
    void pack_keys(const Round& round, const Round& next) {
        for (int64_t key = 0; key < ceil_div(round.count, NR) * NR; key += VL) {
            int32_t* target = keys + key / NR * NR * key_words + key % NR;
            for (int i = 0; i < VL; ++i) fetch(next.keys[key + i], call.key_dim);
            for (int64_t unit = 0; unit < key_units; unit += VL) {
                ivec rows[VL];
                for (int i = 0; i < VL; ++i) rows[i] = units_of(round.keys[key + i], unit);
                transpose(rows);
                const int64_t left = std::min<int64_t>(VL, key_units - unit);
                for (int i = 0; i < left; ++i)
                    for (int part = 0; part < T::PARTS; ++part)
                        store(target + ((unit + i) * T::PARTS + part) * NR, T::part(rows[i], part));
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

    // values of a round -> [value panels][words][NR]
    void pack_values(const Round& round, const Round& next) {
        const int64_t words = ceil_div(round.count, NR) * NR / EACH;
        for (int64_t word = 0; word < words; ++word) {
            const Element* const* rows = round.values + word * EACH;
            for (int i = 0; i < EACH; ++i) fetch(next.values[word * EACH + i], call.value_dim);
            for (int64_t column = 0; column < call.value_dim; column += VL) {
                ivec v = (ivec)read_part<T>(rows[0] + column, call.value_dim - column);
                if constexpr (EACH == 2)
                    v = ((v >> 16) & 0xffff) | (ivec)read_part<T>(rows[1] + column, call.value_dim - column);
                store(values + (column / NR * words + word) * NR + column % NR, v);
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
    void soften(int64_t row, int64_t first, int64_t width, float* score, Operand* weight) {
        const float before = maxima[row], now = std::max(before, to_logits(row, first, width, score));
        const float base = now == -INF ? 0 : now, fade = now == before ? 1 : std::exp2(before - base);
        vec total{};
        for (int64_t j = 0; j < width; j += VL) {
            const vec p = exp2v(load<vec>(score + j) - base);
            total += p;
            T::write_operand(weight + j, p);
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
        const int64_t width = std::min(ceil_div(seen, NR), ceil_div(round.count, NR)) * NR;
        for (int64_t key = 0; key < width; key += NR)
            multiply_rows<Packed>(height, {queries + top * LDA, keys + key * key_words, key_words, scores + key, KEYS, false}, amx);
        for (int64_t i = 0; i < height; ++i)
            soften(top + i, round.first, width, scores + i * KEYS, reinterpret_cast<Operand*>(weights + i * LDA));
        add_packed_values(top, height, width, round);
    }

    // adds the values of the first `width` keys of a round, by `weights`, to the sums of rows `top` to `top + height`
    void add_packed_values(int64_t top, int64_t height, int64_t width, const Round& round) {
        const int64_t words = ceil_div(round.count, NR) * NR / EACH;
        for (int64_t column = 0; column < value_width; column += NR)
            multiply_rows<Packed>(height, {weights, values + column * words, width / EACH, sums + top * value_width + column,
                                           value_width, true}, amx);
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
        const bool whole = !amx && call.key_dim % (VL * T::PER_UNIT) == 0 && call.value_dim % NR == 0;
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
        for (int64_t first = group.begin->first_key; first < group.begin->end_key; first = after(first))
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
                const int64_t low = call.window ? std::max<int64_t>(0, position - call.window + 1) / FIRST_KEY * FIRST_KEY : 0;
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
