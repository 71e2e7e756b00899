/* The inner loops of linear.c for one instruction set and one type of weights. Included once for each, with LEVEL,
 * TARGET, WEIGHT, and LANES: the floats of a vector, a divisor of PANEL. No include guard, therefore. */
#define NAME JOIN(JOIN(LEVEL, _), WEIGHT)
#define VECTOR JOIN(NAME, _vector)
#define PARTS (PANEL / LANES)
typedef float VECTOR __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* y[r, p * PANEL + j] = sum over i of x[i, r] * w[p, i, j], with all sums in registers: num_panels and num_rows are
 * constants wherever this is inlined. The sum goes along i, in order, whatever the tile. */
TARGET static inline __attribute__((always_inline)) void JOIN(NAME, _tile)(const float *x, const WEIGHT *w,
                                                                           int64_t k, const int num_panels,
                                                                           const int num_rows, float *y,
                                                                           int64_t y_stride, const int ahead) {
    VECTOR sums[MAX_ROWS][MAX_PANELS * PARTS], ws[MAX_PANELS * PARTS];
    UNROLL for (int r = 0; r < num_rows; r++) UNROLL for (int p = 0; p < num_panels * PARTS; p++) sums[r][p] = (VECTOR){0};
    for (int64_t i = 0; i < k; i++) {
        UNROLL for (int p = 0; p < num_panels * PARTS; p++) {
            const WEIGHT *at = w + ((p / PARTS) * k + i) * PANEL + (p % PARTS) * LANES;
            ws[p] = JOIN(LOAD_, WEIGHT)(at);
            if (p % PARTS == 0 && ahead) __builtin_prefetch(at + ahead);
        }
        UNROLL for (int r = 0; r < num_rows; r++) {
            const float value = x[i * num_rows + r];
            UNROLL for (int p = 0; p < num_panels * PARTS; p++) sums[r][p] += ws[p] * value;
        }
    }
    UNROLL for (int r = 0; r < num_rows; r++) UNROLL for (int p = 0; p < num_panels * PARTS; p++)
        *(VECTOR *)(y + r * y_stride + p * LANES) = sums[r][p];
}

/* Panels first .. last-1 of y [m, n] for x in tiles of MAX_ROWS rows, each [k, rows]. */
TARGET static __attribute__((noinline)) void JOIN(NAME, _panels)(const float *x, const void *weight,
                                                                 int64_t first, int64_t last, int64_t m, int64_t n,
                                                                 int64_t k, float *y) {
    const WEIGHT *w = weight;
    const int wide = m <= MAX_ROWS / 2 ? MAX_PANELS : MAX_PANELS / 2;
    while (first < last) {
        const int num_panels = wide <= last - first ? wide : 1;
        const int is_cut = (first + num_panels) * PANEL > n; /* the last panel holds padding */
        for (int64_t r = 0; r < m; r += MAX_ROWS) {
            const int num_rows = m - r < MAX_ROWS ? m - r : MAX_ROWS;
            float spare[MAX_ROWS * MAX_PANELS * PANEL];
            const int64_t width = num_panels * PANEL, stride = is_cut ? width : n;
            float *out = is_cut ? spare : y + r * n + first * PANEL;
            const float *rows = x + r * k;
            const WEIGHT *panels = w + first * k * PANEL;
#define CASE(P, R)                                                                         \
    case P * 16 + R:                                                                       \
        if (r == 0)                                                                        \
            JOIN(NAME, _tile)(rows, panels, k, P, R, out, stride, AHEAD / sizeof(WEIGHT)); \
        else                                                                               \
            JOIN(NAME, _tile)(rows, panels, k, P, R, out, stride, 0);                      \
        break;
#define CASES(P) CASE(P, 1) CASE(P, 2) CASE(P, 3) CASE(P, 4) CASE(P, 5) CASE(P, 6)
            switch (num_panels * 16 + num_rows) {
                CASES(4) CASES(2) CASES(1)
                CASE(2, 7) CASE(2, 8) CASE(2, 9) CASE(2, 10) CASE(2, 11) CASE(2, 12)
                CASE(1, 7) CASE(1, 8) CASE(1, 9) CASE(1, 10) CASE(1, 11) CASE(1, 12)
            }
#undef CASES
#undef CASE
            for (int q = 0; is_cut && q < num_rows; q++)
                memcpy(y + (r + q) * n + first * PANEL, spare + q * width, (n - first * PANEL) * sizeof(float));
        }
        first += num_panels;
    }
}
#undef VECTOR
#undef PARTS
#undef NAME
#undef TARGET
#undef LANES
#undef LEVEL
