// The experts of a mixture, on weights that were packed once: for each token, the weighted sum of what its experts say.
//
// Rows that go to one expert are multiplied together, so that its weights are read once; a "visit" is such rows, a
// "round" some visits whose rows fit into the cache. A token's sum runs over its experts in the order of their numbers,
// and nothing in it depends on which tokens are beside it.
#pragma once
#include <omp.h>

#include "linear.h"

extern "C" {

struct ExpertsCall {
    const void *x, *enter, *leave;  // x [tokens][hidden]; weights as written by pack_weight, one expert behind the other
    const float *enter_bias, *leave_bias;  // [experts][their columns] or null
    const int64_t* chosen;                 // [tokens][top_k] numbers of experts; any other number: none
    const float* shares;                   // [tokens][top_k]
    void* out;                             // [tokens][hidden]
    int64_t tokens, top_k, experts, hidden, middle, x_stride;
    int64_t gate, gated;  // a Gate; gated: columns of `enter` are gates and values in turn, VL of each; `middle` is a multiple of VL
    float limit, alpha;   // SWIGLU: min(g, limit) * sigmoid(alpha * g) * (clamp(v, limit) + 1). Else gate and value are clamped if limit > 0
};
}

namespace {

struct Visit {
    int64_t expert, first, rows;  // pairs order[first ..] of token and expert
    int64_t top;                  // its first row within the round
};

template <class T> struct Experts {
    using Element = typename T::Element;
    const ExpertsCall& call;
    const Weight<T> enter{static_cast<const int32_t*>(call.enter), call.hidden, call.middle * (call.gated ? 2 : 1)};
    const Weight<T> leave{static_cast<const int32_t*>(call.leave), call.middle, call.hidden};
    std::vector<int64_t> order;  // pairs (token * top_k + place), by expert
    std::vector<Visit> visits;
    static constexpr int64_t PER_PASS = T::KC * T::PER_UNIT;  // elements

    Weight<T> of(const Weight<T>& all, int64_t expert) const {
        return {all.packed + expert * all.panels * all.units * NR, all.depth, all.columns};
    }

    // counting sort: tokens of an expert stay in order
    void find_visits() {
        std::vector<int64_t> ends(call.experts + 1, 0);
        const int64_t pairs = call.tokens * call.top_k;
        const auto is_expert = [&](int64_t pair) { return call.chosen[pair] >= 0 && call.chosen[pair] < call.experts; };
        for (int64_t pair = 0; pair < pairs; ++pair)
            if (is_expert(pair)) ++ends[call.chosen[pair] + 1];
        for (int64_t expert = 0; expert < call.experts; ++expert) {
            const int64_t count = ends[expert + 1], most = std::min(enter.block, leave.block);
            ends[expert + 1] += ends[expert];
            for (int64_t done = 0; done < count; done += most)
                visits.push_back({expert, ends[expert] + done, std::min(most, count - done), 0});
        }
        order.resize(ends[call.experts]);
        for (int64_t pair = 0; pair < pairs; ++pair)
            if (is_expert(pair)) order[ends[call.chosen[pair]]++] = pair;
    }

    vec gated(vec gate, vec value) const {
        const vec most = splat(call.limit), least = -most;  // what is not a number stays so
        if (call.limit > 0) gate = gate > most ? most : gate, value = value > most ? most : value < least ? least : value;
        if (call.gate == SWIGLU) return gate / (1.0f + exp2v(gate * (-LOG2E * call.alpha))) * (value + 1.0f);
        return activated(call.gate, gate) * value;
    }

    // sums of one row and panel -> its place in the rows that `leave` takes
    void finish_entering(const Visit& visit, int64_t row, int64_t panel, const float* sums, int32_t* a) const {
        const auto write = [&](int64_t column, vec v) {
            auto* target = reinterpret_cast<typename T::Operand*>(a + (column / PER_PASS * visit.rows + row) * LDA);
            T::write_operand(target + column % PER_PASS, v);
        };
        vec v[2];
        for (int h = 0; h < 2; ++h) {
            const int64_t column = panel * NR + h * VL;
            v[h] = load<vec>(sums + h * VL);
            if (column >= enter.columns) break;
            if (call.enter_bias) v[h] += load<vec>(call.enter_bias + visit.expert * enter.columns + column);
            if (!call.gated) write(column, activated(call.gate, v[h]));
        }
        if (call.gated) write(panel * VL, gated(v[0], v[1]));
    }

    // adds one row and panel, by the token's share in the expert, to the token's sum
    void finish_leaving(const Visit& visit, int64_t row, int64_t panel, const float* sums, float* totals) const {
        const int64_t pair = order[visit.first + row];
        float* total = totals + pair / call.top_k * leave.panels * NR + panel * NR;
        for (int h = 0; h < 2; ++h) {
            const int64_t column = panel * NR + h * VL, left = call.hidden - column;
            if (left <= 0) return;
            vec v = load<vec>(sums + h * VL);
            if (call.leave_bias) v += read_part<Float32>(call.leave_bias + visit.expert * call.hidden + column, left);
            store(total + h * VL, load<vec>(total + h * VL) + v * call.shares[pair]);
        }
    }

    void write_token(int64_t token, const float* totals) const {
        for (int64_t j = 0; j < call.hidden; j += VL)
            write_part<T>(static_cast<Element*>(call.out) + token * call.hidden + j,
                          load<vec>(totals + token * leave.panels * NR + j), call.hidden - j);
    }

    // `begin` to `end` visits together; `a` are the packed rows of x, `b` those of what lies in between
    void round(const Visit* begin, const Visit* end, int32_t* a, int32_t* b, float* totals) const {
        const int64_t count = end - begin;
        alignas(64) float sums[BLOCK_ROWS * NR];
        for (const Visit* visit = begin; visit < end; ++visit) {
#pragma omp for nowait
            for (int64_t row = 0; row < visit->rows; ++row) {
                const int64_t token = order[visit->first + row] / call.top_k;
                enter.pack(static_cast<const Element*>(call.x) + token * call.x_stride, row, visit->rows,
                           a + visit->top * enter.passes * LDA);
            }
        }
#pragma omp barrier
#pragma omp for
        for (int64_t i = 0; i < count * enter.panels; ++i) {
            const Visit& visit = begin[i / enter.panels];
            const Tiles tiles{visit.rows, enter.amx};
            of(enter, visit.expert).multiply_panel(i % enter.panels, tiles, a + visit.top * enter.passes * LDA, sums);
            for (int64_t row = 0; row < visit.rows; ++row)
                finish_entering(visit, row, i % enter.panels, sums + row * NR, b + visit.top * leave.passes * LDA);
        }
        // a thread has the same panels of every expert: so nobody else adds to its part of a token's sum
        const int64_t threads_here = omp_get_num_threads(), me = omp_get_thread_num();
        for (const Visit* visit = begin; visit < end; ++visit) {
            const Tiles tiles{visit->rows, leave.amx};
            for (int64_t panel = leave.panels * me / threads_here; panel < leave.panels * (me + 1) / threads_here; ++panel) {
                of(leave, visit->expert).multiply_panel(panel, tiles, b + visit->top * leave.passes * LDA, sums);
                for (int64_t row = 0; row < visit->rows; ++row) finish_leaving(*visit, row, panel, sums + row * NR, totals);
            }
        }
#pragma omp barrier
    }

    void run() {
        static thread_local std::vector<int32_t> packed;
        static thread_local std::vector<float> sums;
        find_visits();
        const int64_t most = std::min<int64_t>(enter.block, leave.block), passes = enter.passes + leave.passes;
        int32_t* a = scratch(packed, (most * passes + 2 * MOST_ROWS) * LDA);
        int32_t* b = a + (most * enter.passes + MOST_ROWS) * LDA;
        const int64_t width = leave.panels * NR;
        float* totals = scratch(sums, call.tokens * width);
        std::vector<const Visit*> rounds{visits.data()};
        int64_t rows = 0;
        for (Visit& visit : visits) {
            if (rows + visit.rows > most) rounds.push_back(&visit), rows = 0;
            visit.top = rows, rows += visit.rows;
        }
        rounds.push_back(visits.data() + visits.size());
#pragma omp parallel num_threads(threads) if (int64_t(order.size()) * enter.units * call.middle > 16384)
        {
            const TileRegisters registers(enter.amx);
#pragma omp for
            for (int64_t token = 0; token < call.tokens; ++token) std::fill_n(totals + token * width, width, 0.0f);
            for (size_t i = 0; i + 1 < rounds.size(); ++i) round(rounds[i], rounds[i + 1], a, b, totals);
#pragma omp for
            for (int64_t token = 0; token < call.tokens; ++token) write_token(token, totals);
        }
    }
};

}  // namespace
