/* CPU kernels of the decode step, fp32. Every row's result is the same alone and in company, with any number
 * of threads: work is cut by the row's own length only, and partial results are merged in a fixed order.
 *
 * Plain C behind ctypes (binding.py). */
#include "common.h"

/* Keys per work item of the attention kernel. */
#define PARTITION 256
/* Elements below which waking the other threads costs more than it saves. */
#define SERIAL_ELEMENTS 32768

/* ---- attention ------------------------------------------------------------------------------------------ */

/* What all layers of one forward share; mirrored by binding.AttentionBatch. */
typedef struct {
    int64_t num_tokens, num_seqs, max_blocks, block_size;
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t max_query_len; /* sequences with more query tokens are left to the caller */
    const int64_t *slot_mapping; /* [N] */
    const int32_t *block_tables; /* [B, max_blocks] */
    const int32_t *cu_seqlens_q; /* [B+1] */
    const int32_t *seq_lens;     /* [B] */
    int64_t num_threads;
} AttentionBatch;

typedef struct {
    int32_t seq, kv_head, first, last; /* keys first .. last-1 */
    int64_t out;                       /* index of the item's first partial row */
} Item;

/* Scores, softmax and weighted values of M query rows over the keys first .. last-1 of one kv head.
 * query row m = token * group + g sees keys in [lo, hi) where hi = seq_len - len_q + token + 1.
 * partial: M rows of (max, sum, acc[D]). */
CLONED static void attend(const AttentionBatch *b, const Item *item, const float *q, int64_t q_stride, const float *keys,
                          const float *values, float scale, int64_t window, float *partial) {
    const int64_t d = b->head_dim, group = b->num_heads / b->num_kv_heads;
    const int64_t kv_stride = b->num_kv_heads * d;
    const int64_t start = b->cu_seqlens_q[item->seq], len_q = b->cu_seqlens_q[item->seq + 1] - start;
    const int64_t seq_len = b->seq_lens[item->seq];
    const int32_t *table = b->block_tables + item->seq * b->max_blocks;
    float scores[PARTITION];
    for (int64_t m = 0; m < len_q * group; m++) {
        const int64_t token = m / group, head = item->kv_head * group + m % group;
        const float *query = q + (start + token) * q_stride + head * d;
        int64_t hi = seq_len - len_q + token + 1, lo = window > 0 && hi > window ? hi - window : 0;
        if (lo < item->first) lo = item->first;
        if (hi > item->last) hi = item->last;
        float *row = partial + m * (d + 2), *acc = row + 2, max = -INFINITY, sum = 0.0f;
        memset(acc, 0, d * sizeof(float));
        for (int64_t t = lo; t < hi; t++) {
            const float *key = keys + ((int64_t)table[t / b->block_size] * b->block_size + t % b->block_size) * kv_stride +
                               item->kv_head * d;
            float dot = 0.0f;
            SIMD(reduction(+ : dot))
            for (int64_t i = 0; i < d; i++) dot += query[i] * key[i];
            scores[t - lo] = dot * scale;
            if (scores[t - lo] > max) max = scores[t - lo];
        }
        /* A NaN must come out as NaN, so the maximum is not what decides whether there are keys. */
        const int64_t n = hi > lo ? hi - lo : 0;
        SIMD() for (int64_t i = 0; i < n; i++) {
            const float s = scores[i] - max;
            scores[i] = s == s ? exp_(s) : s;
        }
        SIMD(reduction(+ : sum))
        for (int64_t i = 0; i < n; i++) sum += scores[i];
        for (int64_t t = lo; t < hi; t++) {
            const float *value = values +
                                 ((int64_t)table[t / b->block_size] * b->block_size + t % b->block_size) * kv_stride +
                                 item->kv_head * d;
            const float p = scores[t - lo];
            SIMD() for (int64_t i = 0; i < d; i++) acc[i] += p * value[i];
        }
        row[0] = max;
        row[1] = sum;
    }
}

/* Merge the partial rows of one query row (stride apart) into out[D]. */
static void merge(const float *partial, int64_t count, int64_t stride, int64_t d, float *out) {
    float max = -INFINITY, sum = 0.0f;
    for (int64_t c = 0; c < count; c++)
        if (partial[c * stride] > max) max = partial[c * stride];
    memset(out, 0, d * sizeof(float));
    for (int64_t c = 0; c < count; c++) {
        const float *row = partial + c * stride;
        const float weight = row[0] == -INFINITY && row[1] == 0.0f ? 0.0f : expf(row[0] - max);
        sum += weight * row[1];
        for (int64_t i = 0; i < d; i++) out[i] += weight * row[2 + i];
    }
    for (int64_t i = 0; i < d; i++) out[i] /= sum;
}

/* Writes k and v ([N, Hkv, D], rows k_stride and v_stride apart) to the cache, then attends for all sequences of
 * at most max_query_len query tokens; out is [N, Hq, D] contiguous. Returns 0, or 1 if memory ran out. */
int paged_attention(const AttentionBatch *b, const float *q, int64_t q_stride, const float *k, int64_t k_stride,
                    const float *v, int64_t v_stride, float *keys, float *values, float scale, int64_t window,
                    float *out) {
    const int64_t d = b->head_dim, row_bytes = b->num_kv_heads * d * sizeof(float);
    for (int64_t n = 0; n < b->num_tokens; n++) {
        memcpy(keys + b->slot_mapping[n] * b->num_kv_heads * d, k + n * k_stride, row_bytes);
        memcpy(values + b->slot_mapping[n] * b->num_kv_heads * d, v + n * v_stride, row_bytes);
    }
    const int64_t group = b->num_heads / b->num_kv_heads;
    int64_t num_items = 0, num_rows = 0;
    for (int64_t s = 0; s < b->num_seqs; s++)
        num_items += (b->seq_lens[s] + PARTITION - 1) / PARTITION * b->num_kv_heads;
    Item *items = malloc((num_items + 1) * sizeof(Item));
    int64_t *first_item = malloc((b->num_seqs + 1) * sizeof(int64_t));
    if (!items || !first_item) return free(items), free(first_item), 1;
    num_items = 0;
    for (int64_t s = 0; s < b->num_seqs; s++) {
        const int64_t len_q = b->cu_seqlens_q[s + 1] - b->cu_seqlens_q[s], len = b->seq_lens[s];
        first_item[s] = num_items;
        if (len_q > b->max_query_len) continue;
        int64_t seen_from = window > 0 && len - len_q + 1 > window ? len - len_q + 1 - window : 0;
        for (int64_t h = 0; h < b->num_kv_heads; h++)
            for (int64_t p = seen_from / PARTITION * PARTITION; p < len; p += PARTITION) {
                Item item = {(int32_t)s, (int32_t)h, (int32_t)p, (int32_t)(p + PARTITION < len ? p + PARTITION : len), num_rows};
                items[num_items++] = item;
                num_rows += len_q * group;
            }
    }
    first_item[b->num_seqs] = num_items;
    float *partials = malloc((num_rows + 1) * (d + 2) * sizeof(float));
    if (!partials) return free(items), free(first_item), 1;
#pragma omp parallel num_threads(b->num_threads) if (num_items > 1)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_items; i++)
            attend(b, items + i, q, q_stride, keys, values, scale, window, partials + items[i].out * (d + 2));
#pragma omp for schedule(static)
        for (int64_t s = 0; s < b->num_seqs; s++) {
            const int64_t start = b->cu_seqlens_q[s], rows = (b->cu_seqlens_q[s + 1] - start) * group;
            const int64_t parts = (first_item[s + 1] - first_item[s]) / b->num_kv_heads;
            for (int64_t h = 0; parts && h < b->num_kv_heads; h++)
                for (int64_t m = 0; m < rows; m++)
                    merge(partials + (items[first_item[s] + h * parts].out + m) * (d + 2), parts, rows * (d + 2), d,
                          out + ((start + m / group) * b->num_heads + h * group + m % group) * d);
        }
    }
    free(items), free(first_item), free(partials);
    return 0;
}

/* ---- elementwise ---------------------------------------------------------------------------------------- */

CLONED static void norm_row(float *x, const float *residual, const float *weight, float eps, int64_t e, float *out) {
    float sum = 0.0f;
    if (residual) SIMD() for (int64_t i = 0; i < e; i++) x[i] += residual[i];
    SIMD(reduction(+ : sum))
        for (int64_t i = 0; i < e; i++) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / (float)e + eps);
    SIMD() for (int64_t i = 0; i < e; i++) out[i] = x[i] * scale * weight[i];
}

/* out = x / rms(x) * weight over rows of E; with a residual, x += residual first, in place. */
void rms_norm(float *x, const float *residual, const float *weight, float eps, int64_t n, int64_t e, float *out,
              int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (n > 1 && n * e > SERIAL_ELEMENTS)
    for (int64_t r = 0; r < n; r++) norm_row(x + r * e, residual ? residual + r * e : 0, weight, eps, e, out + r * e);
}

/* z * sigmoid(s), both forms of gate below; where exp would overflow the product is 0 to float precision. */
static inline float gated(float z, float s) {
    const float value = z / (1.0f + exp_(-s));
    return s < -88.0f ? 0.0f : (s == s ? value : s);
}

CLONED static void silu_row(const float *gate, const float *up, int64_t f, float *out) {
    SIMD() for (int64_t i = 0; i < f; i++) out[i] = gated(gate[i], gate[i]) * up[i];
}

/* 1 + tanh(u) = 2 sigmoid(2u). */
CLONED static void gelu_tanh_row(const float *gate, const float *up, int64_t f, float *out) {
    SIMD() for (int64_t i = 0; i < f; i++) {
        const float g = gate[i], u = 0.7978845608028654f * (g + 0.044715f * g * g * g);
        out[i] = gated(g, 2.0f * u) * up[i];
    }
}

/* gate_up [N, 2F] -> out [N, F] = act(gate) * up; activation 0: SiLU, 1: GELU in its tanh form. */
void gated_activation(const float *gate_up, int64_t n, int64_t f, int64_t activation, float *out, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (n > 1 && n * f > SERIAL_ELEMENTS)
    for (int64_t r = 0; r < n; r++) {
        const float *gate = gate_up + r * 2 * f;
        if (activation == 0)
            silu_row(gate, gate + f, f, out + r * f);
        else
            gelu_tanh_row(gate, gate + f, f, out + r * f);
    }
}
