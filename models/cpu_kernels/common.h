/* What the kernels share. */
#ifndef SPECSERVE_COMMON_H
#define SPECSERVE_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Inner functions are compiled for several x86 levels, of which one is chosen at load time, so that one binary is
 * fast everywhere. They are called from the OpenMP loops, since an outlined loop body is not cloned. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), noinline))
#else
#define CLONED __attribute__((target_clones("avx512f", "avx2", "default"), noinline))
#endif
#else
#define CLONED __attribute__((noinline))
#endif
#define SIMD(clauses) PRAGMA_(omp simd clauses)
#define PRAGMA_(text) _Pragma(#text)

typedef float vector8 __attribute__((vector_size(32), aligned(4), may_alias));

/* exp for -87 <= x <= 88, about 1 ulp (the polynomial of Cephes' expf); vectorizes where libm's does not. What is
 * beyond counts as that bound, a NaN as the lower one. */
static inline float exp_(float x) {
    x = x > -87.3f ? x : -87.3f;
    x = x < 88.0f ? x : 88.0f;
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

#endif
