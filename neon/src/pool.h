/* A pool of threads runs a job in phases. Only the library uses the pool, so it is not in rvm.h.
 *
 * A phase ends when all its chunks (pieces of work) are done, and not when all threads have arrived. So a thread that
 * the system puts to sleep outside a chunk does not delay the other threads. All threads must run the same phases,
 * with the same number of chunks.
 *
 * Example:
 *   static void job(pool_worker *w, void *ctx) {        // every thread runs the whole function
 *       for (uint32_t i; pool_next(w, 12, &i);) part_one(ctx, i);    // 12 chunks; each free thread takes the next
 *       for (uint32_t i; pool_next(w, 40, &i);) part_two(ctx, i);    // begins when all 12 chunks are done
 *   }
 *   pool_run(pool, job, ctx, sizeof *ctx);
 */
#ifndef RVM_POOL_H
#define RVM_POOL_H

#include <stddef.h>
#include <stdint.h>

typedef struct pool pool;

/* The state of one thread in a job. */
typedef struct {
    pool *owner;
    uint32_t thread; /* thread: the index of the thread; 0 is the thread that called pool_run */
    uint32_t phase;
    int holding; /* holding: 1 if the thread has taken a chunk that it has not yet reported as done */
} pool_worker;

/* Make a pool. Return NULL if no memory is free. threads: the number of threads, including the caller's thread; a pool
 * of 1 makes no thread and takes no lock. The threads start when the first job runs, and again when the first job of a
 * forked child process runs. */
pool *pool_create(uint32_t threads);
void pool_destroy(pool *p);
uint32_t pool_threads(const pool *p);

/* Use only the first n threads of the pool from the next job on. */
void pool_limit(pool *p, uint32_t n);

enum { POOL_CONTEXT = 256 };

/* Run `job` on the calling thread, and on each thread of the pool that wakes before the job ends. Return when all
 * chunks of the job are done. A pool runs one job at a time. Each thread except the caller's has its own copy of the
 * `size` <= POOL_CONTEXT bytes of ctx, because a thread that has slept can still go through finished phases after
 * pool_run has returned. So outside a chunk, the function `job` must read only its copy of ctx, and data that never
 * changes. */
void pool_run(pool *p, void (*job)(pool_worker *w, void *ctx), void *ctx, size_t size);

/* Report the thread's previous chunk as done. Then store the index of the phase's next chunk in *i and return 1. If no
 * chunk is left, wait until all n chunks of the phase are done, and return 0. */
int pool_next(pool_worker *w, uint32_t n, uint32_t *i);

#endif
