/* Which implementations of the layers this machine runs, fastest first. */
#include "page_terms.h"

#include <string.h>

extern const rvm_layers rvm_layers_scalar;
#ifdef RVM_HAVE_AVX2
extern const rvm_layers rvm_layers_avx2;
#endif
#ifdef RVM_HAVE_AVX512
extern const rvm_layers rvm_layers_avx512;
#endif
#ifdef RVM_HAVE_NEON
extern const rvm_layers rvm_layers_neon;
#endif

/* The implementation that rvm_impl knows by this name; every processor with AVX2 converts half floats too. */
static const rvm_layers *named(const char *name) {
#ifdef RVM_HAVE_AVX512
    if (strcmp(name, "avx512") == 0) return &rvm_layers_avx512;
#endif
#ifdef RVM_HAVE_AVX2
    if (strcmp(name, "avx2") == 0) return &rvm_layers_avx2;
#endif
#ifdef RVM_HAVE_NEON
    if (strcmp(name, "neon") == 0) return &rvm_layers_neon;
#endif
    return strcmp(name, "scalar") == 0 ? &rvm_layers_scalar : NULL;
}

const char *rvm_layers_impl_name(size_t index) { return rvm_impl_name(index); }

const rvm_layers *rvm_layers_impl(const char *name) {
    const rvm_kernels *k = rvm_impl(name);
    return k ? named(k->name) : NULL;
}

size_t rvm_attention_scratch(size_t rows, size_t head_dim) {
    const size_t width = value_rows(head_dim), page = RVM_PAGE_TOKENS;
    const size_t codes = row_codes(RVM_COLD, head_dim) + row_codes(RVM_WARM, head_dim);
    return rows * (2 * width + page + sum_width(head_dim) + 2) + 2 * page * width + rows * codes / sizeof(float);
}
