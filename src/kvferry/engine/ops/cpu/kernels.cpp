// What Python calls. `half` is 1 for bfloat16 and 0 for float32.
#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "small.h"

extern "C" {

enum Kind : int64_t { LINEAR, NORM, ROTATE };

struct KernelStep {
    Kind kind;
    union {
        LinearCall* linear;
        NormCall* norm;
        RotateCall* rotation;
    };
};

int64_t vector_length() { return VL; }

// for a test that Python means the same by them
int64_t sizeof_LinearCall() { return sizeof(LinearCall); }
int64_t sizeof_NormCall() { return sizeof(NormCall); }
int64_t sizeof_RotateCall() { return sizeof(RotateCall); }
int64_t sizeof_AttentionCall() { return sizeof(AttentionCall); }
int64_t sizeof_ExpertsCall() { return sizeof(ExpertsCall); }
int64_t sizeof_WriteCall() { return sizeof(WriteCall); }
int64_t sizeof_KernelStep() { return sizeof(KernelStep); }

// for all calls from now on, whichever thread makes them
void set_threads(int64_t count) { threads = int(count); }

int64_t packed_units(int64_t columns, int64_t depth, int64_t half) {
    return ceil_div(columns, NR) * NR * (half ? ceil_div(depth, 2) : depth);
}

void pack_weight(const void* weight, int64_t columns, int64_t depth, int32_t* packed, int64_t half) {
    half ? pack_weight<BFloat16>(static_cast<const uint16_t*>(weight), columns, depth, packed)
         : pack_weight<Float32>(static_cast<const float*>(weight), columns, depth, packed);
}

void linear(const LinearCall* call, int64_t half) { half ? Linear<BFloat16>{*call}.run() : Linear<Float32>{*call}.run(); }

void experts(const ExpertsCall* call, int64_t half) { half ? Experts<BFloat16>{*call}.run() : Experts<Float32>{*call}.run(); }

void paged_attention(const AttentionCall* call, int64_t half) {
    half ? paged_attention<BFloat16>(*call) : paged_attention<Float32>(*call);
}

void rms_norm(const NormCall* call, int64_t half) { half ? rms_norm<BFloat16>(*call) : rms_norm<Float32>(*call); }

void rotate(const RotateCall* call, int64_t half) { half ? rotate<BFloat16>(*call) : rotate<Float32>(*call); }

void write_kv(const WriteCall* call) { write(*call); }

int64_t most_likely_permitted(const float* logits, const uint8_t* permitted, int64_t size) {
    return largest_permitted(logits, permitted, size);
}

// several of the above in one call, on `rows` rows (tokens) each
void run_steps(const KernelStep* steps, int64_t count, int64_t rows, int64_t half) {
    for (const KernelStep* step = steps; step < steps + count; ++step) switch (step->kind) {
            case LINEAR: step->linear->rows = rows; linear(step->linear, half); break;
            case NORM: step->norm->outer = rows; rms_norm(step->norm, half); break;
            case ROTATE: step->rotation->tokens = rows; rotate(step->rotation, half); break;
        }
}
}
