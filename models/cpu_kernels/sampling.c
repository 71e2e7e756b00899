/* Sampling kernels on rows of logits, fp32. A row's result depends on nothing but that row.
 *
 * They do what models/sampling/row_ops.py says in torch; plain C behind ctypes (binding.py). */
#include "common.h"

#define BLOCK 256

/* ---- largest token -------------------------------------------------------------------------------------- */

/* The largest of a block, NaN if it holds one. */
CLONED static float block_max(const float *x, int64_t n) {
    float max = -INFINITY;
    int32_t has_nan = 0;
    SIMD(reduction(max : max) reduction(| : has_nan))
    for (int64_t i = 0; i < n; i++) {
        max = x[i] > max ? x[i] : max;
        has_nan |= x[i] != x[i];
    }
    return has_nan ? NAN : max;
}

/* The first of the largest; -1 if there is a NaN or +inf, or nothing but -inf. */
static int64_t argmax_row(const float *x, int64_t v, float *max) {
    int64_t where = 0;
    *max = -INFINITY;
    for (int64_t first = 0; first < v; first += BLOCK) {
        const float largest = block_max(x + first, first + BLOCK < v ? BLOCK : v - first);
        if (largest != largest) return -1;
        if (largest > *max) {
            *max = largest;
            where = first;
        }
    }
    if (isinf(*max)) return -1;
    while (x[where] != *max) where++;
    return where;
}

/* logits [R, V] -> out [R] */
void argmax(const float *logits, int64_t r, int64_t v, int64_t *out, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (r > 1)
    for (int64_t i = 0; i < r; i++) {
        float max;
        out[i] = argmax_row(logits + i * v, v, &max);
    }
}

/* ---- mass ----------------------------------------------------------------------------------------------- */

CLONED static void add_block_mass(const float *x, float max, int64_t n, double *out) {
    float mass = 0.0f, weighted = 0.0f;
    SIMD(reduction(+ : mass, weighted))
    for (int64_t i = 0; i < n; i++) {
        const float s = x[i] - max;
        const float p = s < -87.0f ? 0.0f : exp_(s);
        mass += p;
        weighted += s < -87.0f ? 0.0f : s * p;
    }
    out[0] += mass;
    out[1] += weighted;
}

/* logits [R, V] -> out [R, 3]: the maximum m, sum of exp(x - m), sum of (x - m) exp(x - m); NaN if not finite. */
void row_mass(const float *logits, int64_t r, int64_t v, double *out, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (r > 1)
    for (int64_t i = 0; i < r; i++) {
        float max;
        double *row = out + 3 * i;
        if (argmax_row(logits + i * v, v, &max) < 0) {
            row[0] = row[1] = row[2] = NAN;
            continue;
        }
        row[0] = max;
        row[1] = row[2] = 0.0;
        for (int64_t first = 0; first < v; first += BLOCK)
            add_block_mass(logits + i * v + first, max, first + BLOCK < v ? BLOCK : v - first, row + 1);
    }
}

/* ---- the likeliest n, sorted ---------------------------------------------------------------------------- */

/* Unsigned integers in the order of falling floats; -0 is 0. */
static inline uint32_t key_of(float x) {
    const union {
        float f;
        uint32_t i;
    } bits = {x + 0.0f};
    return bits.i >> 31 ? bits.i : bits.i ^ 0x7fffffffU;
}

static inline float value_of(uint32_t key) {
    const union {
        uint32_t i;
        float f;
    } bits = {key >> 31 ? key : key ^ 0x7fffffffU};
    return bits.f;
}

#define BINS 2048

/* A key not below the n-th smallest of count keys, and close to it: the upper edge of its bin of 22 bits. */
static uint32_t nth_key_bound(const float *x, int64_t count, int64_t n) {
    int64_t bins[BINS];
    uint32_t prefix = 0;
    for (int level = 0; level < 2; level++) {
        memset(bins, 0, sizeof(bins));
        for (int64_t i = 0; i < count; i++) {
            const uint32_t key = key_of(x[i]);
            if (level == 0)
                bins[key >> 21]++;
            else if (key >> 21 == prefix)
                bins[key >> 10 & (BINS - 1)]++;
        }
        uint32_t bin = 0;
        while (bin < BINS - 1 && bins[bin] < n) n -= bins[bin++];
        prefix = prefix << 11 | bin;
    }
    return prefix << 10 | 1023;
}

CLONED static void max_into(const float *x, int64_t n, float *out) {
    SIMD()
    for (int64_t i = 0; i < n; i++) out[i] = x[i] > out[i] ? x[i] : out[i];
}

/* All tokens of at least the threshold as key << 32 | id, in the order of ids; their number. */
CLONED static int64_t collect(const float *x, int64_t v, float threshold, uint64_t *out) {
    int64_t count = 0;
    for (int64_t first = 0; first < v; first += 32) {
        const int64_t n = first + 32 < v ? 32 : v - first;
        int32_t any = 0;
        SIMD(reduction(| : any))
        for (int64_t i = first; i < first + n; i++) any |= x[i] >= threshold;
        if (!any) continue;
        for (int64_t i = first; i < first + n; i++) {
            out[count] = (uint64_t)key_of(x[i]) << 32 | (uint32_t)i;
            count += x[i] >= threshold;
        }
    }
    return count;
}

/* Stable radix sort by the upper 32 bits; scratch holds count too. */
static void sort_by_key(uint64_t *items, int64_t count, uint64_t *scratch) {
    for (int shift = 32; shift < 64; shift += 8) {
        int64_t starts[257] = {0};
        for (int64_t i = 0; i < count; i++) starts[(items[i] >> shift & 255) + 1]++;
        for (int b = 0; b < 256; b++) starts[b + 1] += starts[b];
        for (int64_t i = 0; i < count; i++) scratch[starts[items[i] >> shift & 255]++] = items[i];
        uint64_t *swap = items;
        items = scratch;
        scratch = swap;
    }
}

/* The n largest of a row. The n-th largest of the maxima of 4n groups bounds the n-th largest from below. */
static void head_row(const float *x, int64_t v, int64_t n, float *values, int64_t *ids, uint64_t *items,
                     float *maxima) {
    float threshold = -INFINITY;
    if (4 * n < v) {
        memcpy(maxima, x, 4 * n * sizeof(float));
        for (int64_t first = 4 * n; first < v; first += 4 * n)
            max_into(x + first, first + 4 * n < v ? 4 * n : v - first, maxima);
        threshold = value_of(nth_key_bound(maxima, 4 * n, n));
        if (threshold != threshold) threshold = -INFINITY;
    }
    int64_t count = collect(x, v, threshold, items);
    sort_by_key(items, count, items + v + 1);
    if (count > n) count = n;
    for (int64_t i = 0; i < count; i++) {
        ids[i] = (int64_t)(items[i] & 0xffffffffU);
        values[i] = x[ids[i]];
    }
    for (int64_t i = count; i < n; i++) { /* only where there are NaNs */
        ids[i] = 0;
        values[i] = -INFINITY;
    }
}

/* logits [R, V] -> values, ids [R, n]: the n largest, ties in the order of ids. 1 if memory ran out. */
int sorted_head(const float *logits, int64_t r, int64_t v, int64_t n, float *values, int64_t *ids,
                int64_t num_threads) {
    int failed = 0;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) reduction(| : failed) if (r > 1)
    for (int64_t i = 0; i < r; i++) {
        uint64_t *items = malloc(2 * (v + 1) * sizeof(uint64_t));
        float *maxima = malloc(4 * n * sizeof(float));
        if (items && maxima)
            head_row(logits + i * v, v, n, values + i * n, ids + i * n, items, maxima);
        else
            failed = 1;
        free(items), free(maxima);
    }
    return failed;
}

/* ---- Gumbel-max ----------------------------------------------------------------------------------------- */

/* A bijective mixer of 32 bits with low bias (the constants of Wellons' lowbias32). */
static inline uint32_t mix(uint32_t h) {
    h ^= h >> 16;
    h *= 0x7feb352dU;
    h ^= h >> 15;
    h *= 0x846ca68bU;
    h ^= h >> 16;
    return h;
}

/* 32 random bits of a token under two words of a row's key. */
static inline uint32_t token_bits(uint32_t token, uint32_t k0, uint32_t k1) { return mix(mix(token + k0) ^ k1); }

/* An exponential draw E = -log(1 - w), w in (0, 1) from 64 bits. */
static double exponential(uint32_t token, const uint32_t *key) {
    const uint32_t high = token_bits(token, key[0], key[1]), low = token_bits(token, key[2], key[3]);
    const double w = ((double)high + ((double)low + 0.5) * 0x1p-32) * 0x1p-32;
    return -log1p(-(w < 1.0 ? w : 0x1.fffffffffffffp-1));
}

/* Scaled logits and their exponentials (rounded up a little) of a block. Returns the largest of p * best - w: where
 * it is below 0, no token of the block beats a best with E / p = best. */
CLONED static float block_margin(const float *x, float max, float inverse_temperature, int64_t first, int64_t n,
                                 const uint32_t *key, float best, float *scaled, float *p) {
    const uint32_t k0 = key[0] + (uint32_t)first, k1 = key[1];
    float margin = -INFINITY;
    SIMD(reduction(max : margin))
    for (int32_t i = 0; i < (int32_t)n; i++) {
        const uint32_t bits = token_bits((uint32_t)i, k0, k1);
        const float w = (float)(int32_t)(bits >> 8) * 0x1p-24f; /* rounded down, and E >= w */
        scaled[i] = (x[i] - max) * inverse_temperature;
        p[i] = scaled[i] < -87.0f ? 0.0f : exp_(scaled[i]) * 1.00001f;
        const float m = p[i] * best - w;
        margin = m > margin ? m : margin;
    }
    return margin;
}

/* argmax over tokens of scaled logit - log(E): a draw from the softmax. As E >= w, a token can only win if
 * w <= p * (E / p of the best so far); logarithms are taken for those few alone. */
static int64_t gumbel_argmax_row(const float *x, int64_t v, float inverse_temperature, const uint32_t *key) {
    float max, scaled[BLOCK], p[BLOCK];
    int64_t winner = argmax_row(x, v, &max);
    if (winner < 0) return -1;
    double e = exponential((uint32_t)winner, key), best_score = -log(e);
    float best = (float)e * 1.00001f;
    for (int64_t first = 0; first < v; first += BLOCK) {
        const int64_t n = first + BLOCK < v ? BLOCK : v - first;
        if (block_margin(x + first, max, inverse_temperature, first, n, key, best, scaled, p) < 0.0f) continue;
        for (int64_t i = 0; i < n; i++) {
            const uint32_t token = (uint32_t)(first + i);
            if ((float)(token_bits(token, key[0], key[1]) >> 8) * 0x1p-24f > p[i] * best) continue;
            e = exponential(token, key);
            const double score = (double)scaled[i] - log(e);
            if (score > best_score || (score == best_score && first + i < winner)) {
                best_score = score;
                winner = first + i;
                best = (float)(e / exp((double)scaled[i])) * 1.00001f;
            }
        }
    }
    return winner;
}

/* logits [R, V], inverse temperatures [R], keys [R, 4] -> out [R]; -1 where argmax gives that. */
void gumbel_argmax(const float *logits, int64_t r, int64_t v, const float *inverse_temperatures, const uint32_t *keys,
                   int64_t *out, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (r > 1)
    for (int64_t i = 0; i < r; i++)
        out[i] = gumbel_argmax_row(logits + i * v, v, inverse_temperatures[i], keys + i * 4);
}
