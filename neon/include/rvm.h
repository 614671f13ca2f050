/* librvm: the C kernels of ruvmlx.
 *
 * float32, row-major, no allocation, no threads, no dependencies. Pointers need no alignment and
 * sizes no padding. Buffers must not overlap.
 *
 *   const rvm_kernels *k = rvm_impl(NULL);          // the fastest this machine runs
 *   int rc = k->head_add(hidden, a, b, scale, tokens, dim, vocab, rank, logits);
 *
 * Every kernel returns RVM_OK, or says why it did nothing:
 *   RVM_BAD_ARGUMENT  a null pointer, a size of 0, a rank over RVM_MAX_RANK, a token id out of range
 *   RVM_NOT_FINITE    NaN or Inf came in or would have come out, unless a kernel passes them on. Weights and accumulators are
 *                     untouched then; the contents of other outputs are undefined.
 * A logit of -inf is no error: it means probability 0.
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

#define RVM_ABI_VERSION 16 /* changes with any signature or field below */
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
