/* This file lists the implementations that this machine can run, fastest first. Each implementation of vectors
 * (rvm_kernels with its rvm_layers) and of matrices (rvm_matmul) has one row. RVM_HAVE_<NAME> and
 * RVM_HAVE_MATMUL_<NAME> come from CMakeLists.txt. */
#define _GNU_SOURCE /* for syscall under -std=c11 */
#include "rvm.h"

#include <string.h>

/* ---- features of this machine's processor ---- */

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Return a bit of the register eax of cpuid leaf 7, subleaf 1. This function is necessary because older compilers do
 * not know the feature's name "avxvnni". */
static inline int cpuid_7_1_eax(int bit) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> bit & 1);
}

static inline int cpuid_1_ecx(int bit) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> bit & 1);
}

/* __builtin_cpu_supports also checks that the operating system saves the wide registers. */
static inline int has_avx2(void) {
    const int f16c = 29;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpuid_1_ecx(f16c);
}

static inline int has_avxvnni(void) { return has_avx2() && cpuid_7_1_eax(4); }

static inline int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static inline int has_avx512vnni(void) { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

/* Return 1 if this process can use AMX. The function asks Linux for permission, because a process must not use the AMX
   tile registers without permission. */
static inline int has_amx(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    const int request = 0x1023, tile_data = 18, tile = 24, int8 = 25; /* ARCH_REQ_XCOMP_PERM; bits of edx */
    unsigned a, b, c, d;
    return has_avx512vnni() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> tile & 1) && (d >> int8 & 1) &&
           syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return 0;
#endif
}

#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

static inline int feature(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value;
}

static inline int has_dotprod(void) { return feature("hw.optional.arm.FEAT_DotProd"); }
static inline int has_i8mm(void) { return has_dotprod() && feature("hw.optional.arm.FEAT_I8MM"); }

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

static inline int has_dotprod(void) { return getauxval(AT_HWCAP) >> 20 & 1; }                   /* the flag ASIMDDP */
static inline int has_i8mm(void) { return has_dotprod() && (getauxval(AT_HWCAP2) >> 13 & 1); } /* the flag I8MM */

#elif defined(__aarch64__)
static inline int has_dotprod(void) { return 0; }
static inline int has_i8mm(void) { return 0; }
#endif

/* ---- vectors ---- */

#ifdef RVM_HAVE_SCALAR /* RVM_HAVE_SCALAR is not defined in programs that test only the matrix kernels */

#define VECTORS(name, runs)                                             \
    {                                                                   \
        extern const rvm_kernels rvm_impl_##name;                       \
        if ((runs) && index-- == 0) return &rvm_impl_##name;            \
    }

static const rvm_kernels *kernels_at(size_t index) {
#ifdef RVM_HAVE_AVX512
    VECTORS(avx512, has_avx512())
#endif
#ifdef RVM_HAVE_AVX2
    VECTORS(avx2, has_avx2())
#endif
#ifdef RVM_HAVE_NEON
    VECTORS(neon, 1) /* every 64-bit ARM has NEON */
#endif
    VECTORS(scalar, 1)
    return NULL;
}

const char *rvm_impl_name(size_t index) {
    const rvm_kernels *k = kernels_at(index);
    return k ? k->name : NULL;
}

const rvm_kernels *rvm_impl(const char *name) {
    for (size_t i = 0;; i++) {
        const rvm_kernels *k = kernels_at(i);
        if (!k || !name || strcmp(k->name, name) == 0) return k;
    }
}

const rvm_layers *rvm_layers_impl(const char *name) {
    const rvm_kernels *k = rvm_impl(name);
    return k ? k->layers : NULL;
}

int rvm_abi_version(void) { return RVM_ABI_VERSION; }

#endif

/* ---- matrices ---- */

typedef struct {
    const rvm_matmul *matmul;
    const char *layers; /* layers: the name of the vector implementation (rvm_kernels) whose layers run with these matrices */
} matrices;

#define MATRICES(name, layers, runs)                                                      \
    {                                                                                     \
        extern const rvm_matmul rvm_matmul_##name;                                        \
        if ((runs) && index-- == 0) return (matrices){&rvm_matmul_##name, layers};        \
    }

static matrices matrices_at(size_t index) {
#ifdef RVM_HAVE_MATMUL_AMX
    MATRICES(amx, "avx512", has_amx())
#endif
#ifdef RVM_HAVE_MATMUL_AVX512VNNI
    MATRICES(avx512vnni, "avx512", has_avx512vnni())
#endif
#ifdef RVM_HAVE_MATMUL_AVXVNNI
    MATRICES(avxvnni, "avx2", has_avxvnni())
#endif
#ifdef RVM_HAVE_MATMUL_AVX512
    MATRICES(avx512, "avx512", has_avx512())
#endif
#ifdef RVM_HAVE_MATMUL_AVX2
    MATRICES(avx2, "avx2", has_avx2())
#endif
#ifdef RVM_HAVE_MATMUL_NEON_I8MM
    MATRICES(neon_i8mm, "neon", has_i8mm())
#endif
#ifdef RVM_HAVE_MATMUL_NEON_DOTPROD
    MATRICES(neon_dotprod, "neon", has_dotprod())
#endif
#ifdef RVM_HAVE_MATMUL_NEON
    MATRICES(neon, "neon", 1) /* every 64-bit ARM has NEON */
#endif
    MATRICES(scalar, "scalar", 1)
    return (matrices){NULL, NULL};
}

const char *rvm_matmul_impl_name(size_t index) {
    const rvm_matmul *m = matrices_at(index).matmul;
    return m ? m->name : NULL;
}

const rvm_matmul *rvm_matmul_impl(const char *name) {
    for (size_t i = 0;; i++) {
        const rvm_matmul *m = matrices_at(i).matmul;
        if (!m || !name || strcmp(m->name, name) == 0) return m;
    }
}

const char *rvm_matmul_layers(const rvm_matmul *matmul) {
    for (size_t i = 0;; i++) {
        const matrices m = matrices_at(i);
        if (!m.matmul || m.matmul == matmul) return m.layers;
    }
}
