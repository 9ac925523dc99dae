// The small operations between linear layers and attention, each in one pass over memory.
#pragma once
#include "tile.h"

extern "C" {

struct NormCall {
    const void* x;  // [outer][inner][size]
    const float* weight;
    void* out;  // [outer][inner][size]; may be x
    int64_t outer, inner, size, outer_stride, inner_stride, out_outer_stride, out_inner_stride;
    int64_t round_first;  // x / rms(x) is rounded to the format of x before it is multiplied by the weight
    float epsilon;
};

struct RotateCall {
    void* x;                     // [tokens][heads][size], changed in place
    const void *cosine, *sine;  // [tokens][size]
    int64_t tokens, heads, size, token_stride, head_stride;
};

struct WriteCall {  // strides and sizes in bytes, so that any format will do
    char* cache;
    const char *key, *value;
    const int64_t* slots;
    int64_t tokens, kv_heads, block_size, key_bytes, value_bytes, block_stride, head_stride;
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
};
}

namespace {

constexpr int64_t SMALL = 32768;  // elements below which threads cost more than they save

template <class T> void rms_norm_row(const NormCall& call, const typename T::Element* x, typename T::Element* out) {
    const int64_t size = call.size;
    vec squares{};
    for (int64_t i = 0; i < size; i += VL) {
        const vec v = read_part<T>(x + i, size - i);
        squares += v * v;
    }
    const float factor = 1 / std::sqrt(sum_of(squares) / size + call.epsilon);
    for (int64_t i = 0; i < size; i += VL) {
        vec v = read_part<T>(x + i, size - i) * factor;
        if (call.round_first) v = T::rounded(v);
        write_part<T>(out + i, v * read_part<Float32>(call.weight + i, size - i), size - i);
    }
}

// x[size] turned in place, element i with i + size / 2 (the pairing of GPT-NeoX, Llama and most since)
template <class T> void rotate_row(typename T::Element* x, const typename T::Element* cosine, const typename T::Element* sine, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += VL) {
        const int64_t left = half - i;
        const vec a = read_part<T>(x + i, left), b = read_part<T>(x + half + i, left);
        write_part<T>(x + i, a * read_part<T>(cosine + i, left) - b * read_part<T>(sine + i, left), left);
        write_part<T>(x + half + i, b * read_part<T>(cosine + half + i, left) + a * read_part<T>(sine + half + i, left), left);
    }
}

template <class T> void rms_norm(const NormCall& call) {
#pragma omp parallel for num_threads(threads) if (call.outer * call.inner * call.size > SMALL)
    for (int64_t row = 0; row < call.outer * call.inner; ++row)
        rms_norm_row<T>(call,
                        static_cast<const typename T::Element*>(call.x) + row / call.inner * call.outer_stride +
                            row % call.inner * call.inner_stride,
                        static_cast<typename T::Element*>(call.out) + row / call.inner * call.out_outer_stride +
                            row % call.inner * call.out_inner_stride);
}

template <class T> void rotate(const RotateCall& call) {
    using Element = typename T::Element;
#pragma omp parallel for num_threads(threads) if (call.tokens * call.heads * call.size > SMALL)
    for (int64_t token = 0; token < call.tokens; ++token)
        for (int64_t head = 0; head < call.heads; ++head)
            rotate_row<T>(static_cast<Element*>(call.x) + token * call.token_stride + head * call.head_stride,
                          static_cast<const Element*>(call.cosine) + token * call.size,
                          static_cast<const Element*>(call.sine) + token * call.size, call.size);
}

typedef float Eight __attribute__((vector_size(32), aligned(4)));
typedef int32_t EightBits __attribute__((vector_size(32)));
typedef int64_t FourBits __attribute__((vector_size(32)));

// Whether each of eight tokens is permitted by its bit, the lowest first: all bits of a lane or none.
EightBits lanes_of(uint8_t permitted) {
    return (int32_t(permitted) & EightBits{1, 2, 4, 8, 16, 32, 64, 128}) != 0;
}

bool any_of(EightBits lanes) {
    const FourBits words = reinterpret_cast<FourBits>(lanes);
    return words[0] | words[1] | words[2] | words[3];
}

// Calls `visit(index of the first token, bits)` for each eight tokens until it returns true, but not for sixty-four of
// which none is permitted. `size` is a multiple of eight.
template <class Visit>
void for_permitted(const uint8_t* permitted, int64_t size, Visit visit) {
    const int64_t bytes = size / 8;
    for (int64_t begin = 0; begin < bytes; begin += 8) {
        const int64_t end = std::min<int64_t>(begin + 8, bytes);
        uint64_t word = 0;
        std::memcpy(&word, permitted + begin, end - begin);
        if (!word) continue;
        for (int64_t byte = begin; byte < end; ++byte)
            if (visit(byte * 8, permitted[byte])) return;
    }
}

// The first of the largest logits[size] among permitted tokens; -1: there is none above minus infinity.
int64_t largest_permitted(const float* logits, const uint8_t* permitted, int64_t size) {
    const float none = -std::numeric_limits<float>::infinity();
    const int64_t whole = size / 8 * 8;
    Eight largest_by_lane[2] = {Eight{} + none, Eight{} + none};  // two, as each waits for the one before
    for_permitted(permitted, whole, [&](int64_t i, uint8_t bits) {
        Eight& so_far = largest_by_lane[i / 8 % 2];
        const Eight group = *reinterpret_cast<const Eight*>(logits + i);
        so_far = (lanes_of(bits) & (group > so_far)) ? group : so_far;
        return false;
    });
    float largest = none;
    for (const Eight& lanes : largest_by_lane)
        for (int lane = 0; lane < 8; ++lane) largest = std::max(largest, lanes[lane]);
    for (int64_t i = whole; i < size; ++i)
        if (permitted[i / 8] >> i % 8 & 1) largest = std::max(largest, logits[i]);
    if (largest == none) return -1;
    int64_t first = whole;
    for_permitted(permitted, whole, [&](int64_t i, uint8_t bits) {
        const bool is_here = any_of(lanes_of(bits) & (*reinterpret_cast<const Eight*>(logits + i) == largest));
        if (is_here) first = i;
        return is_here;
    });
    while (logits[first] != largest || !(permitted[first / 8] >> first % 8 & 1)) ++first;
    return first;
}

void write(const WriteCall& call) {
    for (int64_t token = 0; token < call.tokens; ++token)
        for (int64_t head = 0; head < call.kv_heads; ++head) {
            const int64_t block = call.slots[token] / call.block_size, offset = call.slots[token] % call.block_size;
            char* start = call.cache + block * call.block_stride + head * call.head_stride;
            std::memcpy(start + offset * call.key_bytes, call.key + token * call.key_token_stride + head * call.key_head_stride,
                        call.key_bytes);
            std::memcpy(start + call.block_size * call.key_bytes + offset * call.value_bytes,
                        call.value + token * call.value_token_stride + head * call.value_head_stride, call.value_bytes);
        }
}

}  // namespace
