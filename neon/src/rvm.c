/* Which implementations this machine runs, fastest first. */
#include "rvm.h"

#include <string.h>

extern const rvm_kernels rvm_impl_scalar;
#ifdef RVM_HAVE_AVX2
extern const rvm_kernels rvm_impl_avx2;
#endif
#ifdef RVM_HAVE_AVX512
extern const rvm_kernels rvm_impl_avx512;
#endif
#ifdef RVM_HAVE_NEON
extern const rvm_kernels rvm_impl_neon;
#endif

/* __builtin_cpu_supports also asks whether the operating system saves the wide registers. */
#ifdef RVM_HAVE_AVX512
static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

#ifdef RVM_HAVE_AVX2
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif

static const rvm_kernels *at(size_t index) {
#ifdef RVM_HAVE_AVX512
    if (has_avx512() && index-- == 0) return &rvm_impl_avx512;
#endif
#ifdef RVM_HAVE_AVX2
    if (has_avx2() && index-- == 0) return &rvm_impl_avx2;
#endif
#ifdef RVM_HAVE_NEON
    if (index-- == 0) return &rvm_impl_neon; /* part of every 64-bit ARM */
#endif
    return index == 0 ? &rvm_impl_scalar : NULL;
}

const char *rvm_impl_name(size_t index) {
    const rvm_kernels *k = at(index);
    return k ? k->name : NULL;
}

const rvm_kernels *rvm_impl(const char *name) {
    if (!name) return at(0);
    for (size_t i = 0;; i++) {
        const rvm_kernels *k = at(i);
        if (!k || strcmp(k->name, name) == 0) return k;
    }
}

int rvm_abi_version(void) { return RVM_ABI_VERSION; }
