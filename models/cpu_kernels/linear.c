/* x [m, k] times the transpose of a weight [n, k], fp32, for few rows and for many.
 *
 * The weight is stored in panels of PANEL outputs, [ceil(n / PANEL), k, PANEL], so that lanes are outputs and a sum
 * goes along k in order. A row's result is therefore the same bits alone, in any batch, and with any number of
 * threads, and a step reads each weight once, at the speed of the memory. */
#include "common.h"

#include <omp.h>

#define PANEL 16
#define MAX_ROWS 12  /* rows of a tile: 12 rows * 2 panels, or 6 * 4, fill the 32 registers of AVX-512 */
#define MAX_PANELS 4
#define AHEAD 512 /* floats: how far the weights are fetched before their use */
#define UNROLL _Pragma("GCC unroll 16")
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

#define NAME plain
#define TARGET
#define LANES 4
#include "linear_tile.h"

typedef void Panels(const float *, const float *, int64_t, int64_t, int64_t, int64_t, int64_t, float *);

#if defined(__x86_64__) && defined(__GNUC__)
#define NAME avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#include "linear_tile.h"
#define NAME avx512
#define TARGET __attribute__((target("avx512f,prefer-vector-width=512")))
#define LANES 16
#include "linear_tile.h"

static Panels *best(int level) {
    if (level >= 2 && __builtin_cpu_supports("avx512f")) return avx512_panels;
    return level >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? avx2_panels : plain_panels;
}
#else
static Panels *best(int level) { return plain_panels; }
#endif

static int max_level = 2;

/* For tests: 0 plain C, 1 at most AVX2, 2 at most AVX-512. */
void limit_instructions(int64_t level) { max_level = (int)level; }

/* y [m, n] = x w^T + bias (or none); returns 0, or 1 if memory ran out. */
int linear(int64_t m, const float *x, const float *w, const float *bias, int64_t n, int64_t k, float *y,
           int64_t num_threads) {
    Panels *panels = best(max_level);
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
        for (int64_t r = 0; bias && r < m; r++)
            for (int64_t j = first; j < (end < n ? end : n); j++) y[r * n + j] += bias[j];
    }
    if (m > 1) free(tiles);
    return 0;
}
