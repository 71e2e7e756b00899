/* CPU kernels of the decode step, fp32. Every row's result is the same alone and in company, with any number
 * of threads: work is cut by the row's own length only, and partial results are merged in a fixed order.
 *
 * Plain C behind ctypes (binding.py). Inner functions are compiled for several x86 levels and chosen at load
 * time; they are called from the OpenMP loops, as outlined loop bodies would not be cloned. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), noinline))
#else
#define CLONED __attribute__((noinline))
#endif
#define SIMD _Pragma("omp simd")

/* Keys per work item of the attention kernel. */
#define PARTITION 256
/* Elements below which waking the other threads costs more than it saves. */
#define SERIAL_ELEMENTS 32768

/* exp for x <= 88, about 1 ulp (the polynomial of Cephes' expf); vectorizes where libm's does not. */
static inline float exp_(float x) {
    x = x < -87.3f ? -87.3f : (x > 88.0f ? 88.0f : x);
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
            _Pragma("omp simd reduction(+ : dot)") for (int64_t i = 0; i < d; i++) dot += query[i] * key[i];
            scores[t - lo] = dot * scale;
            if (scores[t - lo] > max) max = scores[t - lo];
        }
        /* A NaN must come out as NaN, so the maximum is not what decides whether there are keys. */
        const int64_t n = hi > lo ? hi - lo : 0;
        SIMD for (int64_t i = 0; i < n; i++) {
            const float s = scores[i] - max;
            scores[i] = s == s ? exp_(s) : s;
        }
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < n; i++) sum += scores[i];
        for (int64_t t = lo; t < hi; t++) {
            const float *value = values +
                                 ((int64_t)table[t / b->block_size] * b->block_size + t % b->block_size) * kv_stride +
                                 item->kv_head * d;
            const float p = scores[t - lo];
            SIMD for (int64_t i = 0; i < d; i++) acc[i] += p * value[i];
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
    if (residual) SIMD for (int64_t i = 0; i < e; i++) x[i] += residual[i];
    _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < e; i++) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / (float)e + eps);
    SIMD for (int64_t i = 0; i < e; i++) out[i] = x[i] * scale * weight[i];
}

/* out = x / rms(x) * weight over rows of E; with a residual, x += residual first, in place. */
void rms_norm(float *x, const float *residual, const float *weight, float eps, int64_t n, int64_t e, float *out,
              int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (n > 1 && n * e > SERIAL_ELEMENTS)
    for (int64_t r = 0; r < n; r++) norm_row(x + r * e, residual ? residual + r * e : 0, weight, eps, e, out + r * e);
}

CLONED static void silu_row(const float *gate, const float *up, int64_t f, float *out) {
    SIMD for (int64_t i = 0; i < f; i++) {
        const float value = gate[i] / (1.0f + exp_(-gate[i])) * up[i];
        out[i] = gate[i] == gate[i] ? value : gate[i];
    }
}

CLONED static void gelu_tanh_row(const float *gate, const float *up, int64_t f, float *out) {
    SIMD for (int64_t i = 0; i < f; i++) {
        const float g = gate[i], u = 0.7978845608028654f * (g + 0.044715f * g * g * g);
        const float value = 0.5f * g * (2.0f - 2.0f / (exp_(2.0f * u) + 1.0f)) * up[i];
        out[i] = g == g ? value : g;
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

/* ---- Gumbel-max ----------------------------------------------------------------------------------------- */

/* A bijective mixer of 32 bits with low bias (constants of Wellons' "triple32"-family search, lowbias32). */
static inline uint32_t mix(uint32_t h) {
    h ^= h >> 16;
    h *= 0x7feb352dU;
    h ^= h >> 15;
    h *= 0x846ca68bU;
    h ^= h >> 16;
    return h;
}

/* 32 random bits of a token under a row's key; lane 0 are the high ones, lane 1 the low ones. */
static inline uint32_t token_bits(uint32_t token, uint32_t k0, uint32_t k1) { return mix(mix(token + k0) ^ k1); }

#define GUMBEL_BLOCK 256

/* The largest of p * best - w over a block: above 0 means that some token may beat the best so far. */
CLONED static float block_margin(const float *p, int64_t first, int64_t n, uint32_t k0, uint32_t k1, float best) {
    float margin = -INFINITY;
    _Pragma("omp simd reduction(max : margin)") for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = token_bits((uint32_t)(first + i), k0, k1);
        const float w = (float)(int32_t)(bits >> 8) * 0x1p-24f; /* rounded down: a lower bound of -log(u) */
        const float m = p[i] * best - w;
        margin = m > margin ? m : margin;
    }
    return margin;
}

CLONED static void exp_row(const float *logits, float max, int64_t n, float *p) {
    SIMD for (int64_t i = 0; i < n; i++) p[i] = logits[i] == -INFINITY ? 0.0f : exp_(logits[i] - max) * 1.00001f + 1e-37f;
}

/* argmax over tokens of logit - log(E), E = -log(u) exponential: a draw from softmax(logits).
 *
 * E >= w = 1 - u, so that a token can only win if w < p * (E/p of the best so far); the logarithm is taken for
 * those few alone. p is rounded up a little, w down. */
static int64_t gumbel_argmax_row(const float *logits, int64_t v, const uint32_t *key, float *p) {
    float max = -INFINITY;
    for (int64_t i = 0; i < v; i++) max = logits[i] > max ? logits[i] : max;
    exp_row(logits, max, v, p);
    double best_score = -INFINITY;
    float best = INFINITY; /* E / p of the best, rounded up */
    int64_t winner = -1;
    for (int64_t first = 0; first < v; first += GUMBEL_BLOCK) {
        const int64_t n = first + GUMBEL_BLOCK < v ? GUMBEL_BLOCK : v - first;
        if (winner >= 0 && block_margin(p + first, first, n, key[0], key[1], best) < 0.0f) continue;
        for (int64_t i = first; i < first + n; i++) {
            if (logits[i] == -INFINITY) continue;
            const uint32_t high = token_bits((uint32_t)i, key[0], key[1]);
            if (winner >= 0 && (float)(high >> 8) * 0x1p-24f > p[i] * best) continue;
            const uint32_t low = token_bits((uint32_t)i, key[2], key[3]);
            const double w = ((double)high + ((double)low + 0.5) * 0x1p-32) * 0x1p-32;
            const double e = -log1p(-w), score = (double)logits[i] - log(e);
            if (score > best_score) {
                best_score = score;
                winner = i;
                best = (float)(e / exp((double)logits[i] - (double)max)) * 1.00001f;
            }
        }
    }
    return winner;
}

/* rows of logits [R, V] and keys [R, 4] -> out [R]; scratch is [R, V]. -1 where every logit is -inf. */
void gumbel_argmax(const float *logits, int64_t r, int64_t v, const uint32_t *keys, float *scratch, int64_t *out,
                   int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (r > 1)
    for (int64_t i = 0; i < r; i++) out[i] = gumbel_argmax_row(logits + i * v, v, keys + i * 4, scratch + i * v);
}
