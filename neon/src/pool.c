/* This file has the thread pool of pool.h. A thread that waits spins for a moment (reads a word again and again), then
 * sleeps.
 *
 * Two 64-bit words hold the state that all threads share. Each word has a counter in its upper half:
 *
 *   gate   job number : 32 | open : 1 | threads entering : 31    pool_run opens and closes it
 *   claim  phase      : 32 | next chunk : 32                     pool_next takes chunks from it
 *
 * A thread takes a chunk by compare-and-swap on both halves of `claim`. So a thread that is some phases late cannot
 * take a chunk (a piece of work) of a later phase by mistake: the thread goes through the phases until it reaches the
 * present phase. The thread that reports the last chunk of a phase as done starts the next phase.
 */
#define _GNU_SOURCE /* for sched_yield, pthread_atfork and clock_gettime under -std=c11 */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* PHASE_NS and JOB_NS are the nanoseconds that a thread spins before it sleeps. At the end of a phase a thread spins
 * for PHASE_NS, which is longer than the difference between the fastest and the slowest thread in a phase of a decoded
 * token. Before the next job a thread spins for JOB_NS, because the next token of a reply usually follows soon. If a
 * machine has fewer free cores than threads, a spinning thread can block the thread that it waits for. */
enum { LINE = 64, PHASE_NS = 20000, JOB_NS = 60000, STACK = 1 << 20 };
static const uint64_t OPEN = 1u << 31, ENTERING = (1u << 31) - 1;

typedef struct {
    pool *owner;
    uint32_t thread;
    pthread_t id;
} member;

struct pool {
    _Alignas(LINE) _Atomic uint64_t claim;
    _Alignas(LINE) _Atomic uint32_t done;
    _Alignas(LINE) _Atomic uint64_t gate;
    _Alignas(LINE) _Atomic uint32_t sleepers;
    _Atomic uint32_t limit, quit;
    void (*job)(pool_worker *, void *);
    const void *ctx;
    size_t ctx_size;
    uint32_t first_phase, threads, started, forks;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    member members[];
};

static _Atomic uint32_t forks; /* forks: the number of forks that led to this process; a fork does not copy the threads of a pool */

static void after_fork(void) { atomic_fetch_add(&forks, 1); }

static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static uint32_t upper(_Atomic uint64_t *word) {
    return (uint32_t)(atomic_load_explicit(word, memory_order_acquire) >> 32);
}

/* Wait until the upper half of *word is no longer `old`. Spin for spin_ns nanoseconds, then sleep. */
static void wait_change(pool *p, _Atomic uint64_t *word, uint32_t old, int64_t spin_ns) {
    int64_t start = 0;
    do {
        for (int i = 0; i < 32; i++) {
            if (upper(word) != old) return;
            pause_cpu();
        }
        if (start == 0) start = now_ns();
    } while (now_ns() - start < spin_ns);
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->sleepers, 1);
    while ((uint32_t)(atomic_load(word) >> 32) == old) pthread_cond_wait(&p->moved, &p->lock);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->lock);
}

/* Set *word and wake the threads that sleep until it changes. This store and the count of sleeping threads are
 * sequentially consistent, so either a thread that is about to sleep sees the new word, or this thread sees it in the
 * count and wakes it. */
static void set_and_wake(pool *p, _Atomic uint64_t *word, uint64_t value) {
    atomic_store(word, value);
    if (atomic_load(&p->sleepers) == 0) return;
    pthread_mutex_lock(&p->lock);
    pthread_cond_broadcast(&p->moved);
    pthread_mutex_unlock(&p->lock);
}

/* The description of a job. A thread copies the description from the pool when the thread enters the job. */
typedef struct {
    void (*job)(pool_worker *, void *);
    pool_worker self;
    _Alignas(16) unsigned char ctx[POOL_CONTEXT];
} visit;

/* Wait for a job with a number other than `seen`, and copy the job's description to *v. Return the number of the job,
 * or 0 if the pool is being destroyed. */
static uint32_t enter(pool *p, uint32_t thread, uint32_t seen, visit *v) {
    for (;;) {
        wait_change(p, &p->gate, seen, JOB_NS);
        /* This order matters: `pool_destroy` sets `quit` before `gate`, so a thread that reads the last gate also reads
         * `quit`. A thread that read `quit` first could wait for a gate after the last one. */
        uint64_t gate = atomic_load(&p->gate);
        if (atomic_load(&p->quit)) return 0;
        seen = (uint32_t)(gate >> 32);
        if (thread >= atomic_load(&p->limit)) continue;
        while ((gate & OPEN) && (uint32_t)(gate >> 32) == seen) {
            if (!atomic_compare_exchange_weak(&p->gate, &gate, gate + 1)) continue;
            v->job = p->job;
            v->self = (pool_worker){p, thread, p->first_phase, 0};
            memcpy(v->ctx, p->ctx, p->ctx_size);
            atomic_fetch_sub(&p->gate, 1);
            return seen;
        }
    }
}

static void *work(void *arg) {
    member *m = arg;
    visit v;
    for (uint32_t seen = 0; (seen = enter(m->owner, m->thread, seen, &v)) != 0;) v.job(&v.self, v.ctx);
    return NULL;
}

/* Set the pool to the state in which it has no threads and has run no job. Job numbers begin at 1, so that a new thread
 * (which has seen 0) enters the first job. */
static void reset(pool *p) {
    atomic_store(&p->claim, 0);
    atomic_store(&p->gate, 0);
    atomic_store(&p->done, 0);
    atomic_store(&p->sleepers, 0);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->moved, NULL);
    p->forks = atomic_load(&forks);
    p->started = 0;
}

pool *pool_create(uint32_t threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    if (threads == 0) threads = 1;
    size_t size = sizeof(pool) + threads * sizeof(member);
    pool *p = aligned_alloc(LINE, (size + LINE - 1) / LINE * LINE);
    if (!p) return NULL;
    p->threads = threads;
    atomic_init(&p->limit, threads);
    atomic_init(&p->quit, 0);
    reset(p);
    return p;
}

/* Start the threads of the pool with all signals blocked, because the signal handlers of Python run in the main
 * thread. */
static void start(pool *p) {
    sigset_t all, before;
    pthread_attr_t attr;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, STACK);
    uint32_t n = 1;
    for (; n < p->threads; n++) {
        p->members[n] = (member){.owner = p, .thread = n};
        if (pthread_create(&p->members[n].id, &attr, work, &p->members[n]) != 0) break;
    }
    p->started = n; /* started: if the system starts fewer threads than wanted, the started threads do all the work */
    pthread_attr_destroy(&attr);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void pool_destroy(pool *p) {
    if (!p) return;
    if (p->forks == atomic_load(&forks)) {
        atomic_store(&p->quit, 1);
        set_and_wake(p, &p->gate, atomic_load(&p->gate) + (UINT64_C(1) << 32));
        for (uint32_t i = 1; i < p->started; i++) pthread_join(p->members[i].id, NULL);
        pthread_mutex_destroy(&p->lock);
        pthread_cond_destroy(&p->moved);
    }
    free(p);
}

uint32_t pool_threads(const pool *p) { return p->threads; }

void pool_limit(pool *p, uint32_t n) { atomic_store(&p->limit, n ? n : 1); }

/* Return the number of the next job. No job has the number 0, because 0 means "no job seen". */
static uint64_t next_job(pool *p) {
    uint32_t number = upper(&p->gate) + 1;
    return (uint64_t)(number ? number : 1) << 32;
}

void pool_run(pool *p, void (*job)(pool_worker *w, void *ctx), void *ctx, size_t size) {
    if (p->forks != atomic_load(&forks)) reset(p);
    if (p->started == 0) start(p);
    pool_worker w = {p, 0, upper(&p->claim), 0};
    p->job = job, p->ctx = ctx, p->ctx_size = size, p->first_phase = w.phase;
    if (p->started > 1 && atomic_load(&p->limit) > 1) set_and_wake(p, &p->gate, next_job(p) | OPEN);
    job(&w, ctx);
    atomic_fetch_and(&p->gate, ~OPEN);
    while (atomic_load_explicit(&p->gate, memory_order_acquire) & ENTERING) sched_yield(); /* this loop waits until no thread copies ctx */
}

static void report(pool_worker *w, uint32_t n) {
    pool *p = w->owner;
    w->holding = 0;
    if (atomic_fetch_add_explicit(&p->done, 1, memory_order_acq_rel) + 1 < n) return;
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    set_and_wake(p, &p->claim, (uint64_t)(w->phase + 1) << 32);
}

int pool_next(pool_worker *w, uint32_t n, uint32_t *i) {
    pool *p = w->owner;
    if (w->holding) report(w, n);
    uint64_t claim = atomic_load_explicit(&p->claim, memory_order_acquire);
    while ((uint32_t)(claim >> 32) == w->phase && (uint32_t)claim < n) {
        if (atomic_compare_exchange_weak_explicit(&p->claim, &claim, claim + 1, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            *i = (uint32_t)claim;
            w->holding = 1;
            return 1;
        }
    }
    if (n && (uint32_t)(claim >> 32) == w->phase) wait_change(p, &p->claim, w->phase, PHASE_NS);
    if (n) w->phase++;
    return 0;
}
