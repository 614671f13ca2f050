/* This file draws, or computes the traces of, one token of each of several replies at once, on the threads of a decoder
 * (rvm_decoder_replies). */
#include "decoder.h"

typedef struct {
    rvm_reply *replies;
    uint32_t n;
} work;

static int one(rvm_reply *r) {
    const rvm_kernels *k = rvm_impl(NULL);
    switch (r->what) {
    case RVM_REPLY_DRAW: return k->draw(r->logits, r->vocab, &r->drawing, r->scratch, &r->token);
    case RVM_REPLY_TRACE:
        return k->trace_accumulate(r->hidden, r->logits, r->lora_a, r->lora_b, r->scale, r->dim, r->vocab, r->rank,
                                   (size_t)r->token, r->e_a, r->e_b, r->logprob);
    default: return RVM_BAD_ARGUMENT;
    }
}

static void job(pool_worker *w, void *ctx) {
    const work *all = ctx;
    for (uint32_t i; pool_next(w, all->n, &i);) all->replies[i].status = one(all->replies + i);
}

int rvm_decoder_replies(rvm_decoder *d, rvm_reply *replies, size_t n) {
    if (!d || !replies || n == 0 || n > UINT32_MAX) return RVM_BAD_ARGUMENT;
    if (atomic_flag_test_and_set(&d->busy)) return RVM_BUSY;
    work all = {replies, (uint32_t)n};
    pool_run(d->pool, job, &all, sizeof all);
    atomic_flag_clear(&d->busy);
    return RVM_OK;
}
