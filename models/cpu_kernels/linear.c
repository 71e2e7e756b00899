/* x [m, k] times the transpose of a weight [n, k], for few rows and for many. The weight is fp32, or int8 with a
 * factor for each output.
 *
 * The weight is stored in panels of PANEL outputs, [ceil(n / PANEL), k, PANEL], so that lanes are outputs and a sum
 * goes along k in order. A row's result is therefore the same bits alone, in any batch, and with any number of
 * threads, and a step reads each weight once, at the speed of the memory. */
#include "common.h"

#include <omp.h>

#define PANEL 16
#define MAX_ROWS 12  /* rows of a tile: 12 rows * 2 panels, or 6 * 4, fill the 32 registers of AVX-512 */
#define MAX_PANELS 4
#define AHEAD 2048 /* bytes: how far the weights are fetched before their use */
#define UNROLL _Pragma("GCC unroll 16")
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

typedef void Panels(const float *, const void *, int64_t, int64_t, int64_t, int64_t, int64_t, float *);

/* LANES weights as floats. GCC 12 takes conversions of bytes apart, so that they need intrinsics. */
#define LOAD_float(at) (*(const VECTOR *)(at))
#define LOAD_int8_t(at) ((VECTOR)JOIN(LEVEL, _bytes)(at))
typedef float plain_lanes __attribute__((vector_size(16)));
static inline plain_lanes plain_bytes(const int8_t *at) { return (plain_lanes){at[0], at[1], at[2], at[3]}; }
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
__attribute__((target("avx2"))) static inline __m256 avx2_bytes(const int8_t *at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
}
__attribute__((target("avx512f"))) static inline __m512 avx512_bytes(const int8_t *at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
}
#endif

#define WEIGHT float
#include "linear_levels.h"
#define WEIGHT int8_t
#include "linear_levels.h"

static int max_level = 2;

/* For tests: 0 plain C, 1 at most AVX2, 2 at most AVX-512. */
void limit_instructions(int64_t level) { max_level = (int)level; }

/* y [m, n] = x w^T + bias (or none); with scales [n] the weight is int8, and w^T counts times those. Returns 0, or 1
 * if memory ran out. */
int linear(int64_t m, const float *x, const void *w, const float *scales, const float *bias, int64_t n, int64_t k,
           float *y, int64_t num_threads) {
    Panels *panels = scales ? best_int8_t(max_level) : best_float(max_level);
    const int64_t num_panels = (n + PANEL - 1) / PANEL;
    float *tiles = m > 1 ? malloc(m * k * sizeof(float)) : (float *)x;
    if (!tiles) return 1;
#pragma omp parallel num_threads(num_threads) if (m * n * k > 1 << 16)
    {
        if (m > 1) {
#pragma omp for
            for (int64_t r = 0; r < m; r += MAX_ROWS) {
                const int64_t num_rows = m - r < MAX_ROWS ? m - r : MAX_ROWS;
                for (int64_t i = 0; i < k; i++)
                    for (int64_t q = 0; q < num_rows; q++) tiles[r * k + i * num_rows + q] = x[(r + q) * k + i];
            }
        }
        const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        panels(tiles, w, num_panels * thread / team, num_panels * (thread + 1) / team, m, n, k, y);
        const int64_t first = num_panels * thread / team * PANEL, end = num_panels * (thread + 1) / team * PANEL;
        for (int64_t r = 0; scales && r < m; r++)
            for (int64_t j = first; j < (end < n ? end : n); j++) y[r * n + j] *= scales[j];
        for (int64_t r = 0; bias && r < m; r++)
            for (int64_t j = first; j < (end < n ? end : n); j++) y[r * n + j] += bias[j];
    }
    if (m > 1) free(tiles);
    return 0;
}
