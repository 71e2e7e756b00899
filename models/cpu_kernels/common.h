/* What the kernels share. */
#ifndef SPECSERVE_COMMON_H
#define SPECSERVE_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Inner functions are compiled for several x86 levels, of which one is chosen at load time, so that one binary is
 * fast everywhere. They are called from the OpenMP loops, since an outlined loop body is not cloned. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), noinline))
#else
#define CLONED __attribute__((target_clones("avx512f", "avx2", "default"), noinline))
#endif
#else
#define CLONED __attribute__((noinline))
#endif
#define SIMD(clauses) PRAGMA_(omp simd clauses)
#define PRAGMA_(text) _Pragma(#text)

typedef float vector8 __attribute__((vector_size(32), aligned(4), may_alias));

/* exp for -87 <= x <= 88, about 1 ulp (the polynomial of Cephes' expf); vectorizes where libm's does not. What is
 * beyond counts as that bound, a NaN as the lower one. */
static inline float exp_(float x) {
    x = x > -87.3f ? x : -87.3f;
    x = x < 88.0f ? x : 88.0f;
    float n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union {
        int32_t i;
        float f;
    } scale = {((int32_t)n + 127) << 23};
    return p * scale.f;
}

/* What all layers of one forward share; mirrored by binding.AttentionBatch. */
typedef struct {
    int64_t num_tokens, num_seqs, max_blocks, block_size;
    int64_t num_heads, num_kv_heads, head_dim;
    const int64_t *slot_mapping; /* [N] */
    const int32_t *block_tables; /* [B, max_blocks] */
    const int32_t *cu_seqlens_q; /* [B+1] */
    const int32_t *seq_lens;     /* [B] */
    int64_t num_threads;
} AttentionBatch;

/* The processes of one machine that compute together; mirrored by binding.SharedRanks. */
typedef struct {
    int64_t rank, size, slot_bytes;
    char *base;
    uint64_t count; /* exchanges of this rank so far */
} SharedRanks;

/* The kernels that a tape can hold (tape.c); n counts rows. */
void rms_norm(int64_t n, float *x, const float *residual, const float *weight, float eps, int64_t e, float *out,
              int64_t num_threads);
void head_norm(int64_t n, float *x, int64_t x_stride, const float *weight, float eps, int64_t heads, int64_t d,
               int64_t num_threads);
void rotate(int64_t n, float *x, int64_t x_stride, const float *cos, const float *sin, int64_t heads, int64_t d,
            int64_t num_threads);
void gated_activation(int64_t n, const float *gate_up, int64_t f, int64_t activation, float *out, int64_t num_threads);
int linear(int64_t n, const float *x, const void *w, const float *scales, const float *bias, int64_t num_outputs,
           int64_t k, float *y, int64_t num_threads);
int paged_attention(const AttentionBatch *b, const float *q, int64_t q_stride, const float *k, int64_t k_stride,
                    const float *v, int64_t v_stride, float *keys, float *values, float scale, int64_t window,
                    float *out);
void all_reduce(int64_t n, float *x, int64_t width, SharedRanks *ranks);

#endif
