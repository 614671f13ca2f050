/* This header has what the files of the decoder's test share: models, decoders and one walk over a sequence. This
 * header also declares the tests of decoder_batch.c and decoder_threads.c. */
#ifndef RVM_DECODER_WALK_H
#define RVM_DECODER_WALK_H

#define SEQUENCE_MALLOC
#include "model.h"
#include "sequence.h"

enum { V = 333, D = 64, STEPS = 160, ROWS = STEPS + 20 };

/* Return a decoder of the model. impl: the name of an implementation; NULL: the fastest one. */
rvm_decoder *decoder(const model *m, const char *impl, uint32_t threads);

/* Return 1 if RVM_FEW is set. If RVM_FEW is set, the test runs only the fastest implementation for each shape, and the
 * scalar implementation once, because data races do not depend on the implementation. */
int runs_few(void);

/* Return the token id that the tests use for the number i. */
int32_t token(size_t i);

/* Return a sequence with enough pages for a walk. If the model has a sliding window, the sequence drops old pages,
   except pages that are needed after a trim. */
sequence start(const model *m, rvm_decoder *d);

/* Compute the logits of ROWS positions: a chunk, single tokens across pages, a trim, and a chunk with all outputs. */
void walk(sequence *c, float *logits);

/* Make a new decoder and a new sequence, run a walk, and return its logits. The caller frees them. */
float *walk_alone(const model *m, const char *impl, uint32_t threads);

/* Return the largest difference of two arrays, divided by the largest absolute value of b. */
double distance(const float *a, const float *b, size_t n);

/* Make the model of shape s, which is number i of n shapes. The last three shapes get models of other architectures
   (make_family, make_layer_norms, make_alibi). */
model *make_model(size_t i, size_t n, shape s);

/* The tests of decoder_batch.c. */
void test_rows(void);
void test_coarse_rows(void);
void test_forks_in_a_batch(void);
void test_replies(void);
void test_bad_rows(void);

/* The tests of decoder_threads.c. */
void test_cancel(void);
void test_fork(void);
void test_pools_end(void);
void test_demotion_beside_a_call(void);
void test_threads(void);

#endif
