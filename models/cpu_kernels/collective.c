/* Collectives of processes on one machine through memory that they share (shared_ranks.py). */
#include "common.h"

#include <sched.h>
#include <stdatomic.h>
#include <time.h>

/* Of rank r, at base + r * stride: a counter of the exchanges that it has written (64 bytes), and two slots in turn. A
 * slot is written again only two exchanges later, when every rank has read it: else it would not have come that far. */
static _Atomic uint64_t *counter(const SharedRanks *ranks, int64_t rank) {
    return (_Atomic uint64_t *)(ranks->base + rank * (64 + 2 * ranks->slot_bytes));
}

static char *slot(const SharedRanks *ranks, int64_t rank) {
    return (char *)counter(ranks, rank) + 64 + (ranks->count & 1) * ranks->slot_bytes;
}

/* For a short time at full speed; then others may need the core. */
static void wait_for(_Atomic uint64_t *value, uint64_t wanted) {
    const struct timespec nap = {0, 50000};
    for (int64_t tries = 0; atomic_load_explicit(value, memory_order_acquire) < wanted; tries++) {
        if (tries > 20000) {
            nanosleep(&nap, NULL);
        } else if (tries > 2000) {
            sched_yield();
        } else {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    }
}

/* Show the others `bytes`, at most slot_bytes; theirs are in their slots when this returns. */
static void exchange(SharedRanks *ranks, const void *own, int64_t bytes) {
    ranks->count++;
    memcpy(slot(ranks, ranks->rank), own, bytes);
    atomic_store_explicit(counter(ranks, ranks->rank), ranks->count, memory_order_release);
    for (int64_t rank = 0; rank < ranks->size; rank++) wait_for(counter(ranks, rank), ranks->count);
}

CLONED static void add(float *x, const float *y, int64_t n) {
    SIMD()
    for (int64_t i = 0; i < n; i++) x[i] += y[i];
}

/* x [n, width] += that of the other ranks, in the order of the ranks, so that the sum is the same bits on all of them
 * and in every batch. */
void all_reduce(int64_t n, float *x, int64_t width, SharedRanks *ranks) {
    const int64_t total = n * width, most = ranks->slot_bytes / (int64_t)sizeof(float);
    for (int64_t first = 0; first < total; first += most) {
        const int64_t count = total - first < most ? total - first : most;
        exchange(ranks, x + first, count * sizeof(float));
        memcpy(x + first, slot(ranks, 0), count * sizeof(float));
        for (int64_t rank = 1; rank < ranks->size; rank++) add(x + first, (float *)slot(ranks, rank), count);
    }
}

/* own [n, row_bytes] of each rank -> out [n, size, row_bytes]; a row must fit a slot. */
void all_gather(int64_t n, const char *own, int64_t row_bytes, char *out, SharedRanks *ranks) {
    const int64_t most = row_bytes ? ranks->slot_bytes / row_bytes : n;
    for (int64_t first = 0; first < n; first += most) {
        const int64_t count = n - first < most ? n - first : most;
        exchange(ranks, own + first * row_bytes, count * row_bytes);
        for (int64_t rank = 0; rank < ranks->size; rank++)
            for (int64_t row = 0; row < count; row++)
                memcpy(out + ((first + row) * ranks->size + rank) * row_bytes, slot(ranks, rank) + row * row_bytes,
                       row_bytes);
    }
}
