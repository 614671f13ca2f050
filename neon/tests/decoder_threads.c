/* This file tests cancelled calls, forked processes, demotion beside a call, and different numbers of threads. */
#define _GNU_SOURCE
#include "decoder_walk.h"

#include "../src/pool.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Raise the cancel flag. The test raises the flag before a call and during calls. A cancelled call must not change the
   KV of earlier tokens. */
static void *raise_flag(void *flag) {
    const struct timespec moment = {0, 300000};
    nanosleep(&moment, NULL);
    __atomic_store_n((int *)flag, 1, __ATOMIC_RELAXED);
    return NULL;
}

void test_cancel(void) {
    model *m = make((shape){RVM_Q4, 4, 2, 32, 0, 0, 0});
    rvm_decoder *d = decoder(m, NULL, 3);
    sequence c = sequence_of(d, 2200), other = sequence_of(d, 2200);
    float *logits = malloc(V * sizeof *logits), *want = malloc(V * sizeof *want);
    int32_t tokens[96] = {0};
    size_t done = 0;
    for (int i = 0; i < 20; i++) {
        int flag = i == 0;
        pthread_t thread;
        if (i) pthread_create(&thread, NULL, raise_flag, &flag);
        int rc = RVM_OK;
        for (int j = 0; j < 1000 && rc == RVM_OK; j++) {
            rc = sequence_forward(&c, tokens, 96, 1, NULL, logits, &flag);
            if (rc == RVM_OK) done += 96;
            if (done > 2000) sequence_trim(&c, done), done = 0;
        }
        CHECK(rc == RVM_CANCELLED && c.offset == done, "%d at %zu", rc, c.offset);
        if (i) pthread_join(thread, NULL);
    }
    CHECK(sequence_forward(&c, tokens, 5, 1, NULL, logits, NULL) == RVM_OK, "after a cancel");
    while (other.offset < done) sequence_forward(&other, tokens, 96, 0, NULL, NULL, NULL);
    CHECK(sequence_forward(&other, tokens, 5, 1, NULL, want, NULL) == RVM_OK, "the same, undisturbed");
    CHECK(memcmp(logits, want, V * sizeof *want) == 0, "other bits after a cancel");
    free(logits), free(want);
    sequence_end(&c), sequence_end(&other);
    rvm_decoder_destroy(d);
    destroy(m);
}

static void take_all(pool_worker *w, void *ctx) {
    (void)ctx;
    for (uint32_t i; pool_next(w, 1, &i););
}

/* Create, use and destroy many pools. A thread can still be on its way out of the job when `pool_destroy` begins. A
   thread that misses the end waits for ever, and the alarm then ends the test. */
void test_pools_end(void) {
    char unused = 0;
    alarm(300);
    for (int i = 0; i < 20000; i++) {
        pool *p = pool_create(8);
        pool_run(p, take_all, &unused, 1);
        pool_destroy(p);
    }
    alarm(0);
}

void test_fork(void) {
    model *m = make((shape){RVM_Q4, 4, 2, 32, 0, 0, 0});
    rvm_decoder *d = decoder(m, NULL, 3);
    sequence c = start(m, d);
    float *want = walk_alone(m, NULL, 1), *got = calloc(ROWS * V, sizeof *got);
    walk(&c, got);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        sequence other = start(m, d);
        memset(got, 0, ROWS * V * sizeof *got);
        walk(&other, got);
        const int same = memcmp(got, want, ROWS * V * sizeof *got) == 0;
        sequence_end(&other);
        rvm_decoder_destroy(d);
        _exit(!same);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with %d", status);
    sequence_trim(&c, c.offset);
    walk(&c, got);
    CHECK(memcmp(got, want, ROWS * V * sizeof *got) == 0, "the parent after the fork");
    free(got), free(want);
    sequence_end(&c);
    rvm_decoder_destroy(d);
    destroy(m);
}

/* The work of a thread that demotes a page while a call of the decoder reads this page. */
typedef struct {
    const rvm_decoder *d;
    rvm_page from, to;
    int rc;
} demotion;

static void *demote_page(void *what) {
    demotion *job = what;
    job->rc = rvm_decoder_demote(job->d, &job->from, &job->to);
    return NULL;
}

void test_demotion_beside_a_call(void) {
    model *m = make((shape){RVM_Q8, 4, 2, 32, 0, 0, 0});
    rvm_decoder *d = decoder(m, NULL, 2);
    sequence c = start(m, d);
    float *logits = malloc(V * sizeof *logits);
    int32_t tokens[70] = {0};
    CHECK(sequence_forward(&c, tokens, 70, 0, NULL, NULL, NULL) == RVM_OK, "prefill");
    uint8_t *made[2][RVM_HOT];
    for (int beside = 0; beside < 2; beside++)
        for (rvm_tier tier = RVM_COLD; tier < RVM_HOT; tier++) {
            const size_t bytes = rvm_decoder_page_bytes(d, tier);
            uint8_t *to = made[beside][tier] = page_make(bytes);
            demotion job = {d, c.pages[0], {to, tier, 0}, -1};
            pthread_t thread;
            pthread_create(&thread, NULL, demote_page, &job);
            for (int i = 0; beside && i < 20; i++)
                CHECK(sequence_forward(&c, tokens, 1, 1, NULL, logits, NULL) == RVM_OK, "beside");
            pthread_join(thread, NULL);
            CHECK(job.rc == RVM_OK, "%d", job.rc);
            CHECK(!beside || memcmp(to, made[0][tier], bytes) == 0, "tier %d", (int)tier);
        }
    const rvm_page warm = {made[0][RVM_WARM], RVM_WARM, 0}, cold = {made[1][RVM_COLD], RVM_COLD, 0};
    CHECK(rvm_decoder_demote(d, &warm, &cold) == RVM_OK, "warm to cold");
    CHECK(memcmp(made[0][0], made[1][0], rvm_decoder_page_bytes(d, RVM_COLD)) == 0, "hot to cold is both steps");
    CHECK(rvm_decoder_demote(d, &cold, &warm) == RVM_BAD_ARGUMENT, "cold to warm");
    for (int i = 0; i < 2 * RVM_HOT; i++) free(made[i / RVM_HOT][i % RVM_HOT]);
    free(logits);
    sequence_end(&c);
    rvm_decoder_destroy(d);
    destroy(m);
}

/* Run many short jobs on 1 to 16 threads, which can be more threads than cores. The number of threads changes, and the
 * threads sleep in pauses. */
void test_threads(void) {
    model *m = make((shape){RVM_F32, 4, 2, 32, 0, 0, 0});
    const struct timespec pause = {0, 2000000};
    float *want = walk_alone(m, NULL, 1), *got = calloc(ROWS * V, sizeof *got);
    for (uint32_t threads = 1; threads <= 16; threads += 5) {
        rvm_decoder *d = decoder(m, NULL, threads);
        sequence c = start(m, d);
        for (uint32_t i = 0; i < 4; i++) {
            rvm_decoder_use_threads(d, i % 2 ? threads : 1 + i);
            sequence_trim(&c, c.offset);
            walk(&c, got);
            CHECK(memcmp(got, want, ROWS * V * sizeof *got) == 0, "%u threads", threads);
            nanosleep(&pause, NULL);
        }
        sequence_end(&c);
        rvm_decoder_destroy(d);
        rvm_decoder_destroy(decoder(m, NULL, threads)); /* it must be possible to destroy a decoder that never ran a call */
    }
    free(got), free(want);
    destroy(m);
}
