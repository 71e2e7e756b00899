/* CPU kernels of the decode step, fp32. Every row's result is the same alone and in company, with any number
 * of threads: work is cut by the row's own length only, and partial results are merged in a fixed order.
 *
 * Plain C behind ctypes (binding.py). */
#include "common.h"

#include <omp.h>

/* Keys per work item of the attention kernel: few enough to stay in the first cache for all query rows. */
#define PARTITION 64
/* Query rows of a kv head up to which the work is cut by keys, and rows of a work item beyond it. */
#define ROWS_CUT_BY_KEYS 64
#define ROWS_AT_ONCE 48
/* Elements below which waking the other threads costs more than it saves. */
#define SERIAL_ELEMENTS 32768

/* ---- attention ------------------------------------------------------------------------------------------ */

typedef struct {
    int32_t seq, kv_head, first, last; /* keys first .. last-1 */
    int64_t row, num_rows;             /* the query rows of this kv head: m = token * group + g */
    int64_t out;                       /* index of the item's first partial row */
} Item;

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
/* Query rows that see the same keys and are computed together, so that a key or value is loaded once for them. A row's
 * sums go in the same order in any such group. */
#define MAX_GROUP 4

/* out[r][t] = scale * queries[r] . keys[offsets[t]]. Lanes are kept apart in the inner loop and summed afterwards. */
INLINE void dots(const int rows, const float *const *queries, const float *keys, const int64_t *offsets, int64_t n,
                 int64_t d, float scale, float out[][PARTITION]) {
    float lanes[MAX_GROUP][PARTITION][8];
    const int64_t whole = d / 8 * 8;
    for (int64_t t = 0; t < n; t++) {
        const float *key = keys + offsets[t];
        vector8 even[MAX_GROUP], odd[MAX_GROUP];
        UNROLL for (int r = 0; r < rows; r++) even[r] = odd[r] = (vector8){0};
        int64_t i = 0;
        for (; i + 16 <= whole; i += 16) {
            const vector8 first = *(const vector8 *)(key + i), second = *(const vector8 *)(key + i + 8);
            UNROLL for (int r = 0; r < rows; r++) {
                even[r] += *(const vector8 *)(queries[r] + i) * first;
                odd[r] += *(const vector8 *)(queries[r] + i + 8) * second;
            }
        }
        UNROLL for (int r = 0; r < rows; r++) {
            if (i < whole) even[r] += *(const vector8 *)(queries[r] + i) * *(const vector8 *)(key + i);
            *(vector8 *)lanes[r][t] = even[r] + odd[r];
            for (int64_t k = whole; k < d; k++) lanes[r][t][0] += queries[r][k] * key[k];
        }
    }
    for (int r = 0; r < rows; r++) {
        float(*lane)[8] = lanes[r];
        SIMD()
        for (int64_t t = 0; t < n; t++)
            out[r][t] = scale * (((lane[t][0] + lane[t][4]) + (lane[t][1] + lane[t][5])) +
                                 ((lane[t][2] + lane[t][6]) + (lane[t][3] + lane[t][7])));
    }
}

/* out[r][i] = sum over t of weights[r][t] * values[offsets[t] + i], with the sums of 16 and of 8 dimensions of all rows
 * in registers; rows of out are stride apart. */
INLINE void weighted_sums(const int rows, float weights[][PARTITION], const float *values, const int64_t *offsets,
                          int64_t n, int64_t d, float *out, int64_t stride) {
    int64_t i = 0;
    for (; i + 16 <= d; i += 16) {
        vector8 sums[MAX_GROUP][2];
        UNROLL for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = (vector8){0};
        for (int64_t t = 0; t < n; t++) {
            const float *value = values + offsets[t] + i;
            const vector8 first = *(const vector8 *)value, second = *(const vector8 *)(value + 8);
            UNROLL for (int r = 0; r < rows; r++) {
                sums[r][0] += weights[r][t] * first;
                sums[r][1] += weights[r][t] * second;
            }
        }
        UNROLL for (int r = 0; r < rows; r++) {
            *(vector8 *)(out + r * stride + i) = sums[r][0];
            *(vector8 *)(out + r * stride + i + 8) = sums[r][1];
        }
    }
    for (int r = 0; r < rows; r++) {
        int64_t k = i;
        for (; k + 8 <= d; k += 8) {
            vector8 sum = {0};
            for (int64_t t = 0; t < n; t++) sum += weights[r][t] * *(const vector8 *)(values + offsets[t] + k);
            *(vector8 *)(out + r * stride + k) = sum;
        }
        for (; k < d; k++) {
            float sum = 0.0f;
            for (int64_t t = 0; t < n; t++) sum += weights[r][t] * values[offsets[t] + k];
            out[r * stride + k] = sum;
        }
    }
}

/* Scores, softmax and weighted values of a group of query rows over n keys; partial: for each its max, sum, acc[D]. */
INLINE void attend_group(const int rows, const float *const *queries, const float *keys, const float *values,
                         const int64_t *offsets, int64_t n, int64_t d, float scale, float *partial) {
    float scores[MAX_GROUP][PARTITION];
    dots(rows, queries, keys, offsets, n, d, scale, scores);
    for (int r = 0; r < rows; r++) {
        float *row = scores[r], max = -INFINITY, sum = 0.0f;
        SIMD(reduction(max : max))
        for (int64_t i = 0; i < n; i++) max = row[i] > max ? row[i] : max;
        SIMD(reduction(+ : sum))
        for (int64_t i = 0; i < n; i++) {
            const float s = row[i] - max;
            row[i] = s == s ? exp_(s) : s; /* NaN stays NaN */
            sum += row[i];
        }
        partial[r * (d + 2)] = max;
        partial[r * (d + 2) + 1] = sum;
    }
    weighted_sums(rows, scores, values, offsets, n, d, partial + 2, d + 2);
}

/* The query rows of an item over its keys. Query row m = token * group + g sees keys below
 * seq_len - len_q + token + 1, and no further back than the window. */
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
    const float *queries[MAX_GROUP];
    int rows = 0;
    int64_t group_lo = 0, group_hi = 0;
    const int64_t end = item->row + item->num_rows;
    for (int64_t m = item->row; m <= end; m++) {
        const int64_t token = m / group, head = item->kv_head * group + m % group;
        int64_t hi = seq_len - len_q + token + 1, lo = window > 0 && hi > window ? hi - window : 0;
        if (lo < item->first) lo = item->first;
        if (hi > item->last) hi = item->last;
        if (hi < lo) hi = lo;
        if (rows && (m == end || rows == MAX_GROUP || lo != group_lo || hi != group_hi)) {
            const int64_t n = group_hi - group_lo, *where = offsets + (n ? group_lo - item->first : 0);
            float *out = partial + (m - item->row - rows) * (d + 2);
            switch (rows) {
            case 1: attend_group(1, queries, keys, values, where, n, d, scale, out); break;
            case 2: attend_group(2, queries, keys, values, where, n, d, scale, out); break;
            case 3: attend_group(3, queries, keys, values, where, n, d, scale, out); break;
            case 4: attend_group(4, queries, keys, values, where, n, d, scale, out); break;
            }
            rows = 0;
        }
        if (m == end) break;
        group_lo = lo, group_hi = hi;
        queries[rows++] = q + (start + token) * q_stride + head * d;
    }
}

/* Takes the partial rows of the next keys into the rows of the keys before; both are max, sum, acc[D]. */
CLONED static void merge(float *rows, const float *next, int64_t num_rows, int64_t d) {
    for (int64_t r = 0; r < num_rows; r++, rows += d + 2, next += d + 2) {
        if (next[0] == -INFINITY && next[1] == 0.0f) continue;
        const float max = next[0] > rows[0] ? next[0] : rows[0];
        const float old = rows[0] == -INFINITY && rows[1] == 0.0f ? 0.0f : expf(rows[0] - max);
        const float new = expf(next[0] - max);
        rows[0] = max;
        rows[1] = old * rows[1] + new * next[1];
        SIMD() for (int64_t i = 0; i < d; i++) rows[2 + i] = old * rows[2 + i] + new * next[2 + i];
    }
}

/* Out of rows of max, sum, acc[D] of one kv head, from query row `row` on, to out [N, Hq, D]. */
static void divide(const AttentionBatch *b, const Item *item, const float *rows, float *out) {
    const int64_t d = b->head_dim, group = b->num_heads / b->num_kv_heads, start = b->cu_seqlens_q[item->seq];
    for (int64_t m = item->row; m < item->row + item->num_rows; m++, rows += d + 2) {
        float *to = out + ((start + m / group) * b->num_heads + item->kv_head * group + m % group) * d;
        for (int64_t i = 0; i < d; i++) to[i] = rows[2 + i] / rows[1];
    }
}

/* First key that any query of a sequence sees, rounded down to a partition. */
static int64_t first_key(const AttentionBatch *b, int64_t s, int64_t window) {
    const int64_t before = b->seq_lens[s] - (b->cu_seqlens_q[s + 1] - b->cu_seqlens_q[s]);
    return (window > 0 && before + 1 > window ? before + 1 - window : 0) / PARTITION * PARTITION;
}

/* Items of one sequence, also its scratch rows: few query rows are cut by keys, many by rows. */
static int64_t make_items(const AttentionBatch *b, int64_t s, int64_t window, Item *items, int64_t *num_scratch) {
    const int64_t rows = (b->cu_seqlens_q[s + 1] - b->cu_seqlens_q[s]) * (b->num_heads / b->num_kv_heads);
    const int64_t len = b->seq_lens[s], from = first_key(b, s, window);
    int64_t count = 0;
    const int by_rows = rows > ROWS_CUT_BY_KEYS;
    const int64_t row_step = by_rows ? ROWS_AT_ONCE : rows, key_step = by_rows ? len - from : PARTITION;
    /* The heads of a partition follow each other, as they do in memory. */
    for (int64_t key = from; key < len; key += key_step)
        for (int64_t row = 0; row < rows; row += row_step)
            for (int64_t h = 0; h < b->num_kv_heads; h++, count++) {
                const int64_t last = key + key_step < len ? key + key_step : len;
                const int64_t num_rows = row + row_step < rows ? row_step : rows - row;
                if (items) items[count] = (Item){s, h, key, last, row, num_rows, by_rows ? -1 : *num_scratch};
                if (!by_rows) *num_scratch += num_rows;
            }
    return count;
}

/* Rows of an item over all its keys, a partition after the other. */
static void attend_all(const AttentionBatch *b, const Item *item, const float *q, int64_t q_stride, const float *keys,
                       const float *values, float scale, int64_t window, float *rows, float *next) {
    Item part = *item;
    for (int64_t key = item->first; key < item->last; key += PARTITION) {
        part.first = key, part.last = key + PARTITION < item->last ? key + PARTITION : item->last;
        attend(b, &part, q, q_stride, keys, values, scale, window, next);
        if (key == item->first)
            memcpy(rows, next, item->num_rows * (b->head_dim + 2) * sizeof(float));
        else
            merge(rows, next, item->num_rows, b->head_dim);
    }
}

/* Writes k and v ([N, Hkv, D], rows k_stride and v_stride apart) to the cache, then attends; out is [N, Hq, D]
 * contiguous. Returns 0, or 1 if memory ran out. */
int paged_attention(const AttentionBatch *b, const float *q, int64_t q_stride, const float *k, int64_t k_stride,
                    const float *v, int64_t v_stride, float *keys, float *values, float scale, int64_t window,
                    float *out) {
    const int64_t d = b->head_dim, row_bytes = b->num_kv_heads * d * sizeof(float);
    for (int64_t n = 0; n < b->num_tokens; n++) {
        memcpy(keys + b->slot_mapping[n] * b->num_kv_heads * d, k + n * k_stride, row_bytes);
        memcpy(values + b->slot_mapping[n] * b->num_kv_heads * d, v + n * v_stride, row_bytes);
    }
    int64_t num_items = 0, num_scratch = 0;
    for (int64_t s = 0; s < b->num_seqs; s++) num_items += make_items(b, s, window, 0, &num_scratch);
    Item *items = malloc((num_items + 1) * sizeof(Item));
    int64_t *first_item = malloc((b->num_seqs + 1) * sizeof(int64_t));
    const int64_t own = 2 * ROWS_AT_ONCE * (d + 2); /* scratch of a thread */
    float *scratch = malloc((num_scratch * (d + 2) + b->num_threads * own) * sizeof(float));
    if (!items || !first_item || !scratch) return free(items), free(first_item), free(scratch), 1;
    num_items = num_scratch = 0;
    for (int64_t s = 0; s < b->num_seqs; s++) {
        first_item[s] = num_items;
        num_items += make_items(b, s, window, items + num_items, &num_scratch);
    }
    first_item[b->num_seqs] = num_items;
#pragma omp parallel num_threads(b->num_threads) if (num_items > 1)
    {
        float *mine = scratch + num_scratch * (d + 2) + omp_get_thread_num() * own;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_items; i++) {
            if (items[i].out >= 0) {
                attend(b, items + i, q, q_stride, keys, values, scale, window, scratch + items[i].out * (d + 2));
            } else {
                attend_all(b, items + i, q, q_stride, keys, values, scale, window, mine, mine + own / 2);
                divide(b, items + i, mine, out);
            }
        }
#pragma omp for schedule(static)
        for (int64_t s = 0; s < b->num_seqs; s++)
            for (int64_t i = first_item[s]; i < first_item[s + 1] && items[i].out >= 0; i++) {
                float *rows = scratch + items[i].out * (d + 2), *first = rows;
                if (i >= first_item[s] + b->num_kv_heads) {
                    first = scratch + items[first_item[s] + items[i].kv_head].out * (d + 2);
                    merge(first, rows, items[i].num_rows, d);
                }
                if (items[i].last == b->seq_lens[s]) divide(b, items + i, first, out);
            }
    }
    free(items), free(first_item), free(scratch);
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
