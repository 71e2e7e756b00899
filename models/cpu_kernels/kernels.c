/* CPU kernels of the decode step, fp32. Every row's result is the same alone and in company, with any number
 * of threads: work is cut by the row's own length only, and partial results are merged in a fixed order.
 *
 * Plain C behind ctypes (binding.py). */
#include "common.h"

/* Keys per work item of the attention kernel: few enough to stay in the first cache for all query rows. */
#define PARTITION 64
/* Elements below which waking the other threads costs more than it saves. */
#define SERIAL_ELEMENTS 32768

/* ---- attention ------------------------------------------------------------------------------------------ */

typedef struct {
    int32_t seq, kv_head, first, last; /* keys first .. last-1 */
    int64_t out;                       /* index of the item's first partial row */
} Item;

/* out[t] = scale * query . keys[offsets[t]]. Lanes are kept apart in the inner loop and summed afterwards. */
static inline void dots(const float *query, const float *keys, const int64_t *offsets, int64_t n, int64_t d,
                        float scale, float *out) {
    float lanes[PARTITION][8];
    const int64_t whole = d / 8 * 8;
    for (int64_t t = 0; t < n; t++) {
        const float *key = keys + offsets[t];
        vector8 even = {0}, odd = {0};
        int64_t i = 0;
        for (; i + 16 <= whole; i += 16) {
            even += *(const vector8 *)(query + i) * *(const vector8 *)(key + i);
            odd += *(const vector8 *)(query + i + 8) * *(const vector8 *)(key + i + 8);
        }
        if (i < whole) even += *(const vector8 *)(query + i) * *(const vector8 *)(key + i);
        *(vector8 *)lanes[t] = even + odd;
        for (i = whole; i < d; i++) lanes[t][0] += query[i] * key[i];
    }
    SIMD()
    for (int64_t t = 0; t < n; t++)
        out[t] = scale * (((lanes[t][0] + lanes[t][4]) + (lanes[t][1] + lanes[t][5])) +
                          ((lanes[t][2] + lanes[t][6]) + (lanes[t][3] + lanes[t][7])));
}

/* out[i] = sum over t of weights[t] * values[offsets[t] + i], with the sums of 32 and of 8 dimensions in registers. */
static inline void weighted_sum(const float *weights, const float *values, const int64_t *offsets, int64_t n, int64_t d,
                                float *out) {
    int64_t i = 0;
    for (; i + 32 <= d; i += 32) {
        vector8 sums[4] = {{0}, {0}, {0}, {0}};
        for (int64_t t = 0; t < n; t++) {
            const float *value = values + offsets[t] + i;
            for (int j = 0; j < 4; j++) sums[j] += weights[t] * *(const vector8 *)(value + 8 * j);
        }
        for (int j = 0; j < 4; j++) *(vector8 *)(out + i + 8 * j) = sums[j];
    }
    for (; i + 8 <= d; i += 8) {
        vector8 sum = {0};
        for (int64_t t = 0; t < n; t++) sum += weights[t] * *(const vector8 *)(values + offsets[t] + i);
        *(vector8 *)(out + i) = sum;
    }
    for (; i < d; i++) {
        out[i] = 0.0f;
        for (int64_t t = 0; t < n; t++) out[i] += weights[t] * values[offsets[t] + i];
    }
}

/* Scores, softmax and weighted values of all query rows of one kv head over the keys first .. last-1.
 * Query row m = token * group + g sees keys below seq_len - len_q + token + 1, and no further back than the window.
 * partial: for each row its max, sum and acc[D]. */
CLONED static void attend(const AttentionBatch *b, const Item *item, const float *q, int64_t q_stride,
                          const float *keys, const float *values, float scale, int64_t window, float *partial) {
    const int64_t d = b->head_dim, group = b->num_heads / b->num_kv_heads, block_size = b->block_size;
    const int64_t start = b->cu_seqlens_q[item->seq], len_q = b->cu_seqlens_q[item->seq + 1] - start;
    const int64_t seq_len = b->seq_lens[item->seq];
    const int32_t *table = b->block_tables + item->seq * b->max_blocks;
    int64_t offsets[PARTITION]; /* of the keys and values in the cache */
    for (int64_t t = item->first; t < item->last; t++)
        offsets[t - item->first] =
            ((table[t / block_size] * block_size + t % block_size) * b->num_kv_heads + item->kv_head) * d;
    for (int64_t m = 0; m < len_q * group; m++) {
        const int64_t token = m / group, head = item->kv_head * group + m % group;
        int64_t hi = seq_len - len_q + token + 1, lo = window > 0 && hi > window ? hi - window : 0;
        if (lo < item->first) lo = item->first;
        if (hi > item->last) hi = item->last;
        const int64_t n = hi > lo ? hi - lo : 0, *where = offsets + (n ? lo - item->first : 0);
        float scores[PARTITION], max = -INFINITY, sum = 0.0f;
        dots(q + (start + token) * q_stride + head * d, keys, where, n, d, scale, scores);
        SIMD(reduction(max : max))
        for (int64_t i = 0; i < n; i++) max = scores[i] > max ? scores[i] : max;
        SIMD(reduction(+ : sum))
        for (int64_t i = 0; i < n; i++) {
            const float s = scores[i] - max;
            scores[i] = s == s ? exp_(s) : s; /* NaN stays NaN */
            sum += scores[i];
        }
        float *row = partial + m * (d + 2);
        row[0] = max;
        row[1] = sum;
        weighted_sum(scores, values, where, n, d, row + 2);
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
        const int64_t seen_from = window > 0 && len - len_q + 1 > window ? len - len_q + 1 - window : 0;
        /* The heads of a partition follow each other, as they do in memory. */
        for (int64_t p = seen_from / PARTITION * PARTITION; p < len; p += PARTITION)
            for (int64_t h = 0; h < b->num_kv_heads; h++) {
                const int64_t last = p + PARTITION < len ? p + PARTITION : len;
                items[num_items++] = (Item){(int32_t)s, (int32_t)h, (int32_t)p, (int32_t)last, num_rows};
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
                    merge(partials + (items[first_item[s] + h].out + m) * (d + 2), parts,
                          b->num_kv_heads * rows * (d + 2), d,
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
void rms_norm(int64_t n, float *x, const float *residual, const float *weight, float eps, int64_t e, float *out,
              int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (n > 1 && n * e > SERIAL_ELEMENTS)
    for (int64_t r = 0; r < n; r++) norm_row(x + r * e, residual ? residual + r * e : 0, weight, eps, e, out + r * e);
}

CLONED static void head_norm_row(float *x, const float *weight, float eps, int64_t heads, int64_t d) {
    for (int64_t h = 0; h < heads; h++) norm_row(x + h * d, 0, weight + h * d, eps, d, x + h * d);
}

/* Each head of x ([N, H, D], rows x_stride apart) is divided by its rms and multiplied by its weights [H, D], in place. */
void head_norm(int64_t n, float *x, int64_t x_stride, const float *weight, float eps, int64_t heads, int64_t d,
               int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (n > 1 && n * heads * d > SERIAL_ELEMENTS)
    for (int64_t r = 0; r < n; r++) head_norm_row(x + r * x_stride, weight, eps, heads, d);
}

CLONED static void rotate_row(float *x, const float *cos, const float *sin, int64_t heads, int64_t half) {
    for (int64_t h = 0; h < heads; h++) {
        float *first = x + h * 2 * half, *second = first + half;
        SIMD() for (int64_t i = 0; i < half; i++) {
            const float a = first[i], b = second[i];
            first[i] = a * cos[i] - b * sin[i];
            second[i] = b * cos[i] + a * sin[i];
        }
    }
}

/* Rotates the halves of each head of x ([N, H, D], rows x_stride apart), in place; the angles' cosines are the first,
 * their sines the last D / 2 of the rows of cos and sin [N, D]. */
void rotate(int64_t n, float *x, int64_t x_stride, const float *cos, const float *sin, int64_t heads, int64_t d,
            int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (n > 1 && n * heads * d > SERIAL_ELEMENTS)
    for (int64_t r = 0; r < n; r++) rotate_row(x + r * x_stride, cos + r * d, sin + r * d + d / 2, heads, d / 2);
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
void gated_activation(int64_t n, const float *gate_up, int64_t f, int64_t activation, float *out,
                      int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (n > 1 && n * f > SERIAL_ELEMENTS)
    for (int64_t r = 0; r < n; r++) {
        const float *gate = gate_up + r * 2 * f;
        if (activation == 0)
            silu_row(gate, gate + f, f, out + r * f);
        else
            gelu_tanh_row(gate, gate + f, f, out + r * f);
    }
}
