/* A pool of threads runs a job in phases. Only the library uses the pool; it is not in rvm.h.
 *
 *   static void job(pool_worker *w, void *ctx) {        // every thread runs all of it
 *       for (uint32_t i; pool_next(w, 12, &i);) part_one(ctx, i);    // 12 chunks; each free thread takes the next one
 *       for (uint32_t i; pool_next(w, 40, &i);) part_two(ctx, i);    // begins when all 12 chunks are done
 *   }
 *   pool_run(pool, job, ctx);
 *
 * A phase ends when its chunks are done, not when all threads have arrived. So a thread that the system puts to
 * sleep outside a chunk delays no other thread. All threads must run the same phases, with the same number of chunks.
 */
#ifndef RVM_POOL_H
#define RVM_POOL_H

#include <stddef.h>
#include <stdint.h>

typedef struct pool pool;

/* The state of a thread in a job. */
typedef struct {
    pool *owner;
    uint32_t thread; /* index of the thread; 0 is the caller of pool_run */
    uint32_t phase;
    int holding; /* 1 if the thread has claimed a chunk and has not yet reported it as done */
} pool_worker;

/* Make a pool. Return NULL if there is no memory. The number `threads` includes the caller; 1 makes no thread and takes
 * no lock. The threads start with the first job, and again with the first job of a forked child. */
pool *pool_create(uint32_t threads);
void pool_destroy(pool *p);
uint32_t pool_threads(const pool *p);

/* Use only the first n threads from the next job on. */
void pool_limit(pool *p, uint32_t n);

enum { POOL_CONTEXT = 256 };

/* Run job on every thread and return when all its chunks are done. One job at a time.
 * Each thread has its own copy of the `size` <= POOL_CONTEXT bytes of ctx, because a thread that slept can still go
 * through finished phases after pool_run has returned. So outside a chunk a job may read only its copy, and data that
 * never changes. */
void pool_run(pool *p, void (*job)(pool_worker *w, void *ctx), void *ctx, size_t size);

/* Store the index of the phase's next chunk in *i and return 1. Return 0 when all n chunks are done. */
int pool_next(pool_worker *w, uint32_t n, uint32_t *i);

#endif
