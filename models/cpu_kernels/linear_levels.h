/* The inner loops of linear.c for all instruction sets. Included once for each type of weights, WEIGHT. */
#define LEVEL plain
#define TARGET
#define LANES 4
#include "linear_tile.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define LEVEL avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#include "linear_tile.h"
#define LEVEL avx512
#define TARGET __attribute__((target("avx512f,prefer-vector-width=512")))
#define LANES 16
#include "linear_tile.h"

static Panels *JOIN(best_, WEIGHT)(int level) {
    if (level >= 2 && __builtin_cpu_supports("avx512f")) return JOIN(JOIN(avx512_, WEIGHT), _panels);
    if (level >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return JOIN(JOIN(avx2_, WEIGHT), _panels);
    return JOIN(JOIN(plain_, WEIGHT), _panels);
}
#else
static Panels *JOIN(best_, WEIGHT)(int level) { return JOIN(JOIN(plain_, WEIGHT), _panels); }
#endif
#undef WEIGHT
