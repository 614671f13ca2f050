/* This file builds the kernels for AVX-512 with VNNI. */
#include "matrix_512vnni.h"
#include "super_pairs.h"

const rvm_matmul rvm_matmul_avx512vnni = {
    .name = "avx512vnni",
    .acts = acts,
    .matmul = matmul_in_pairs,
    .page_queries = page_queries,
    .page_scores = page_scores,
    .page_values = page_values,
    .peak = peak,
};
