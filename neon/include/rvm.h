/* librvm is the library with the C kernels of ruvmlx.
 *
 * Arrays are float32 if no other type is named, and row-major. A kernel (a function in one of the tables rvm_kernels,
 * rvm_layers and rvm_matmul) allocates no memory and starts no thread. Arrays of floats need no alignment, and their
 * sizes need no padding. Two arrays of one call must not overlap, unless the function's comment permits it.
 *
 * A kernel (except `peak`) returns RVM_OK or an error code. RVM_BAD_ARGUMENT means an argument outside its range, for
 * example a null pointer, a size of 0, a rank over RVM_MAX_RANK or a token id out of range. RVM_NOT_FINITE means that
 * an input or a result is NaN or infinite; the kernels of rvm_layers and rvm_matmul, and a kernel whose comment says
 * "passes NaN on", do not return this error. After one of these two errors, the weights that micro_update changes and
 * the sums of trace_accumulate are unchanged; the contents of other outputs are undefined. A logit of -inf is no error,
 * because it means probability 0.
 *
 * Example:
 *   const rvm_kernels *k = rvm_impl(NULL);          // the fastest implementation that this machine can run
 *   int rc = k->head_add(hidden, a, b, scale, tokens, dim, vocab, rank, logits);
 */
#ifndef RVM_H
#define RVM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define RVM_API __attribute__((visibility("default")))
#else
#define RVM_API
#endif

#define RVM_ABI_VERSION 21 /* RVM_ABI_VERSION grows if a signature or a struct field in rvm*.h changes */
#define RVM_MAX_RANK 64

enum { RVM_OK = 0, RVM_BAD_ARGUMENT = 1, RVM_NOT_FINITE = 2 };

#include "rvm_kernels.h"
#include "rvm_matrix.h"
#include "rvm_rating.h"
#include "rvm_pages.h"
#include "rvm_layers.h"
#include "rvm_decoder.h"

#ifdef __cplusplus
}
#endif
#endif
