/* A pool of threads that runs a job in phases. Used only inside the library; not in rvm.h.
 *
 *   static void job(pool_worker *w, void *ctx) {        // every thread runs all of it
 *       for (uint32_t i; pool_next(w, 12, &i);) part_one(ctx, i);    // 12 chunks, whoever is free
 *       for (uint32_t i; pool_next(w, 40, &i);) part_two(ctx, i);    // begins when all 12 are done
 *   }
 *   pool_run(pool, job, ctx);
 *
 * A phase ends when its chunks are done, not when all threads have arrived: one that the system has
 * put to sleep outside a chunk delays no other thread. All threads must ask for the same phases, with the
 * same number of chunks.
 */
#ifndef RVM_POOL_H
#define RVM_POOL_H

#include <stddef.h>
#include <stdint.h>

typedef struct pool pool;

/* One thread inside one job. */
typedef struct {
    pool *owner;
    uint32_t thread; /* 0 is the caller of pool_run */
    uint32_t phase;
    int holding; /* 1: has claimed a chunk and not yet reported it done */
} pool_worker;

/* `threads` counts the caller; 1 makes no thread and takes no lock. NULL: no memory.
 * Threads start with the first job, and again with the first job of a forked child. */
pool *pool_create(uint32_t threads);
void pool_destroy(pool *p);
uint32_t pool_threads(const pool *p);

/* Let only the first n threads take part from the next job on. */
void pool_limit(pool *p, uint32_t n);

enum { POOL_CONTEXT = 256 };

/* Run job on every thread and return when all its chunks are done. One job at a time.
 * Each thread works on its own copy of the `size` <= POOL_CONTEXT bytes of ctx: one that has been asleep may
 * still walk through phases that are over, when the caller is already somewhere else. Outside a chunk a job
 * may therefore look only at its copy, and at what never changes. */
void pool_run(pool *p, void (*job)(pool_worker *w, void *ctx), void *ctx, size_t size);

/* Stores the index of the phase's next chunk in *i and returns 1; returns 0 when all n chunks are done. */
int pool_next(pool_worker *w, uint32_t n, uint32_t *i);

#endif
