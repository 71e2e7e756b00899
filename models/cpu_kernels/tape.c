/* Runs the recorded kernel calls of a forward without going back to Python between them (tape.py). */
#include "common.h"

typedef union {
    void *p;
    int64_t i;
    double f;
} Argument;

/* Mirrored by tape.Call; `kernel` counts tape.KERNELS. */
typedef struct {
    int64_t kernel;
    Argument a[12];
} Call;

/* The calls for the first n rows of their buffers; returns 0, or 1 if memory ran out. */
int replay(const Call *calls, int64_t count, int64_t n) {
    int failed = 0;
    for (int64_t c = 0; c < count && !failed; c++) {
        const Argument *a = calls[c].a;
        switch (calls[c].kernel) {
        case 0:
            rms_norm(n, a[0].p, a[1].p, a[2].p, a[3].f, a[4].i, a[5].p, a[6].i);
            break;
        case 1:
            head_norm(n, a[0].p, a[1].i, a[2].p, a[3].f, a[4].i, a[5].i, a[6].i);
            break;
        case 2:
            rotate(n, a[0].p, a[1].i, a[2].p, a[3].p, a[4].i, a[5].i, a[6].i);
            break;
        case 3:
            gated_activation(n, a[0].p, a[1].i, a[2].i, a[3].p, a[4].i);
            break;
        case 4:
            failed = linear(n, a[0].p, a[1].p, a[2].p, a[3].p, a[4].i, a[5].i, a[6].p, a[7].i);
            break;
        case 5:
            failed = paged_attention(a[0].p, a[1].p, a[2].i, a[3].p, a[4].i, a[5].p, a[6].i, a[7].p, a[8].p, a[9].f,
                                     a[10].i, a[11].p);
            break;
        case 6:
            all_reduce(n, a[0].p, a[1].i, a[2].p);
            break;
        }
    }
    return failed;
}
