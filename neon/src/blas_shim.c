/* This library is a BLAS for MLX on Linux.
 *
 * MLX's wheel calls cblas_{s,d,c}gemm of a slow reference BLAS (4-8 GFLOP/s). This library exports the same three names
 * and passes each call to an OpenBLAS whose symbols have the prefix `scipy_` (PyPI: scipy-openblas32, 32-bit integers).
 * If this library is loaded into the global scope before MLX, libmlx.so binds to it.
 *
 * Callers use the library in this order (ruvmlx/platform/blas.py):
 *   1. dlopen this library RTLD_LOCAL
 *   2. call rvm_blas_init(path of OpenBLAS); 0 means that it found every symbol
 *   3. only then dlopen the library again RTLD_GLOBAL, so that MLX never gets a library without an OpenBLAS
 *
 * The functions take the enums of cblas.h as int, because the enums are ints in the ABI. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>

#define RVM_EXPORT __attribute__((visibility("default")))

typedef void (*sgemm_fn)(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                         const float *b, int ldb, float beta, float *c, int ldc);
typedef void (*sgemv_fn)(int order, int trans, int m, int n, float alpha, const float *a, int lda, const float *x,
                         int incx, float beta, float *y, int incy);
typedef void (*dgemm_fn)(int order, int ta, int tb, int m, int n, int k, double alpha, const double *a, int lda,
                         const double *b, int ldb, double beta, double *c, int ldc);
typedef void (*cgemm_fn)(int order, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda,
                         const void *b, int ldb, const void *beta, void *c, int ldc);
typedef void (*set_threads_fn)(int n);
typedef int (*get_threads_fn)(void);
typedef char *(*config_fn)(void);

static sgemm_fn sgemm;
static sgemv_fn sgemv;
static dgemm_fn dgemm;
static cgemm_fn cgemm;
static set_threads_fn set_threads;
static get_threads_fn get_threads;
static config_fn config;
static atomic_long calls; /* calls: the number of matrix products since the process started, for tests */

/* Open OpenBLAS and find its functions. Return 0 on success, -1 if OpenBLAS cannot be loaded from the path, and -2 if a
 * symbol is missing. */
RVM_EXPORT int rvm_blas_init(const char *openblas_path)
{
    void *lib = dlopen(openblas_path, RTLD_NOW | RTLD_LOCAL);
    if (!lib) return -1;
    sgemm = (sgemm_fn)dlsym(lib, "scipy_cblas_sgemm");
    sgemv = (sgemv_fn)dlsym(lib, "scipy_cblas_sgemv");
    dgemm = (dgemm_fn)dlsym(lib, "scipy_cblas_dgemm");
    cgemm = (cgemm_fn)dlsym(lib, "scipy_cblas_cgemm");
    set_threads = (set_threads_fn)dlsym(lib, "scipy_openblas_set_num_threads");
    get_threads = (get_threads_fn)dlsym(lib, "scipy_openblas_get_num_threads");
    config = (config_fn)dlsym(lib, "scipy_openblas_get_config");
    return sgemm && sgemv && dgemm && cgemm && set_threads && get_threads && config ? 0 : -2;
}

/* Return a text that describes OpenBLAS, such as "OpenBLAS 0.3.34 ... SkylakeX MAX_THREADS=64". Call rvm_blas_init
 * first. */
RVM_EXPORT const char *rvm_blas_config(void)
{
    return config ? config() : "";
}

RVM_EXPORT void rvm_blas_set_threads(int n)
{
    if (set_threads) set_threads(n);
}

RVM_EXPORT int rvm_blas_get_threads(void)
{
    return get_threads ? get_threads() : 0;
}

/* Return the number of matrix products computed through this library. If only MLX binds to this library, a number above
 * 0 proves that MLX calls it. */
RVM_EXPORT long rvm_blas_calls(void)
{
    return atomic_load_explicit(&calls, memory_order_relaxed);
}

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

/* Compute y = alpha op(B)^T x + beta y for the single row x = op(A) [1, k]:  x[i] = a[i * incx], op(B) [k, n], y
 * [n]. */
static void one_row(int ta, int tb, int n, int k, float alpha, const float *a, int lda, const float *b, int ldb,
                    float beta, float *y)
{
    int incx = ta == NO_TRANS ? 1 : lda;
    if (tb == NO_TRANS)
        sgemv(ROW_MAJOR, TRANS, k, n, alpha, b, ldb, a, incx, beta, y, 1);
    else
        sgemv(ROW_MAJOR, NO_TRANS, n, k, alpha, b, ldb, a, incx, beta, y, 1);
}

/* Compute C = alpha op(A) op(B) + beta C:  op(A) [m, k], op(B) [k, n], C [m, n].
 *
 * Decoding multiplies one row (m = 1) at a time, for which the function calls OpenBLAS's sgemv. OpenBLAS's sgemm would
 * first pack B, and so read B at a third of the memory's speed. sgemv reads B at full speed: on two cores, 1 x 576 x
 * 49152 reads 60 GB/s with sgemv and 20 GB/s with sgemm. */
RVM_EXPORT void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                            const float *b, int ldb, float beta, float *c, int ldc)
{
    atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
    if (order == ROW_MAJOR && m == 1)
        one_row(ta, tb, n, k, alpha, a, lda, b, ldb, beta, c);
    else
        sgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

RVM_EXPORT void cblas_dgemm(int order, int ta, int tb, int m, int n, int k, double alpha, const double *a, int lda,
                            const double *b, int ldb, double beta, double *c, int ldc)
{
    atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
    dgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

RVM_EXPORT void cblas_cgemm(int order, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                            int lda, const void *b, int ldb, const void *beta, void *c, int ldc)
{
    atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
    cgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
