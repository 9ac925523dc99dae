// Attention over a paged KV cache, for prefill and decode alike.
//
// The work is cut into shares: some query rows of one KV head of one sequence, against all keys they see. A row is a
// (token, head) pair, heads innermost, so that all heads of a KV head use its keys while they are near. A share takes
// its keys in rounds: it packs their KV for the register tile and updates an online softmax (Milakov and Gimelshein,
// 2018; FlashAttention). Packing is repaid by many rows in prefill; in decode, memory is the limit, not packing.
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
    const std::vector<Share>& shares;
    const int64_t group = call.heads / call.kv_heads;
    const int64_t key_units = ceil_div(call.key_dim, T::PER_UNIT), value_width = ceil_div(call.value_dim, NR) * NR;
    const int block_shift = __builtin_ctzll(call.block_size);
    const float to_log2 = LOG2E * (call.softcap > 0 ? 1 : call.scale);
    const Share* share = nullptr;
    int32_t *queries = nullptr, *keys = nullptr, *values = nullptr;      // [rows][LDA], and a round's packed KV
    float *sums = nullptr, *maxima = nullptr, *totals = nullptr;         // [rows][value_width], [rows], [rows]
    Round rounds[2];                                                     // the present one and the one that follows
    alignas(64) float scores[MOST_ROWS * KEYS];
    alignas(64) int32_t weights[MOST_ROWS * LDA];
    const bool amx = uses_amx<T>();

    // which keys a row sees: lowest(row) <= key < behind(row)
    int64_t position(int64_t row) const { return share->first_position + row / group; }
    int64_t lowest(int64_t row) const { return call.window ? std::max<int64_t>(0, position(row) - call.window + 1) : 0; }
    int64_t behind(int64_t row) const { return call.causal ? position(row) + 1 : call.context_lens[share->sequence]; }

    int64_t token_of(int64_t row) const { return call.query_starts[share->sequence] + share->first_token + row / group; }
    int64_t head_of(int64_t row) const { return share->kv_head * group + row % group; }

    void find(const Share* owner, int64_t first, Round& round) const {
        round.share = owner, round.first = first, round.count = std::min<int64_t>(KEYS, owner->end_key - first);
        const int32_t* table = call.block_tables + owner->sequence * call.table_stride;
        for (int64_t i = 0; i < KEYS; ++i) {
            const int64_t key = first + std::min(i, round.count - 1), offset = key & (call.block_size - 1);
            const auto* block = static_cast<const Element*>(call.cache) + table[key >> block_shift] * call.block_stride +
                                owner->kv_head * call.head_stride;
            round.keys[i] = block + offset * call.key_dim;
            round.values[i] = block + call.block_size * call.key_dim + offset * call.value_dim;
        }
    }
    // Blocks lie anywhere in memory, so the hardware cannot foresee what comes next: while a round is worked on, the
    // one that follows, be it of the next share, is fetched row by row.
    void find_next(const Round& round, Round& next) const {
        if (round.first + KEYS < round.share->end_key)
            find(round.share, round.first + KEYS, next);
        else if (round.share != &shares.back())
            find(round.share + 1, round.share[1].first_key, next);
        else
            next = round;
    }
    static void fetch(const Element* row, int64_t dim) {
        for (int64_t i = 0; i < dim; i += 64 / sizeof(Element)) __builtin_prefetch(row + i);
    }

    void set_up(int64_t rows) {
        static thread_local std::vector<int32_t> units;
        static thread_local std::vector<float> floats;
        queries = scratch(units, rows * LDA + KEYS * key_units + KEYS * value_width + 2 * NR * VL);
        keys = queries + rows * LDA, values = keys + KEYS * key_units;
        sums = scratch(floats, rows * (value_width + 2));
        maxima = sums + rows * value_width, totals = maxima + rows;
        std::fill(sums, maxima, 0.0f);
        for (int64_t row = 0; row < rows; ++row) {
            const auto* query = static_cast<const Element*>(call.query) + token_of(row) * call.query_token_stride +
                                head_of(row) * call.query_head_stride;
            pack_row<T>(query, call.key_dim, 0, key_units, queries + row * LDA);
            // a sink is one more logit in the softmax that brings no value
            maxima[row] = call.sinks ? call.sinks[head_of(row)] * LOG2E : -INF;
            totals[row] = call.sinks ? 1.0f : 0.0f;
        }
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

    void run(const Share& one) {
        share = &one;
        const Tiles tiles{one.num_tokens * group, amx};
        // whole vectors only: others need the padding of the packed form
        const bool few = tiles.rows <= FEW_ROWS && call.key_dim % (VL * T::PER_UNIT) == 0 && call.value_dim % NR == 0;
        set_up(tiles.rows);
        find(share, one.first_key, rounds[0]);
        for (int64_t first = one.first_key; first < one.end_key; first += KEYS) {
            find_next(rounds[0], rounds[1]);
            few ? attend_few(tiles.rows, rounds[0], rounds[1]) : attend_many(tiles, rounds[0], rounds[1]);
            std::swap(rounds[0], rounds[1]);
        }
        for (int64_t row = 0; row < tiles.rows; ++row) write_row(row);
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
                const int64_t low = call.window ? std::max<int64_t>(0, position - call.window + 1) : 0;
                shares.push_back({b, head, first, count, position, low, call.causal ? position + count : context});
            }
        }
    return shares;
}

template <class T> void paged_attention(const AttentionCall& call) {
    const std::vector<Share> shares = shares_of(call);
#pragma omp parallel num_threads(threads) if (shares.size() > 1)
    {
        Attention<T> attention{call, shares};
        const TileRegisters registers(attention.amx);
        // guided: a thread's shares follow each other, as fetching ahead supposes
#pragma omp for schedule(guided)
        for (size_t i = 0; i < shares.size(); ++i) attention.run(shares[i]);
    }
}

}  // namespace
