/* librvm is the library with the C kernels of ruvmlx.
 *
 * Arrays are float32 and row-major. The kernels allocate no memory, start no threads and have no dependencies. Pointers
 * need no alignment, and sizes need no padding. Buffers must not overlap.
 *
 *   const rvm_kernels *k = rvm_impl(NULL);          // the fastest implementation that this machine can run
 *   int rc = k->head_add(hidden, a, b, scale, tokens, dim, vocab, rank, logits);
 *
 * Every kernel returns RVM_OK, or an error code that says why the kernel did nothing:
 *   RVM_BAD_ARGUMENT  a null pointer, a size of 0, a rank over RVM_MAX_RANK, a token id out of range
 *   RVM_NOT_FINITE    an input or a result is NaN or Inf, unless the kernel's comment says "passes NaN on". After this
 *                     error, weights and accumulators are unchanged; the contents of other outputs are undefined.
 * A logit of -inf is no error, because it means probability 0.
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

#define RVM_ABI_VERSION 17 /* RVM_ABI_VERSION grows if a signature or a field in these headers changes */
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
