/* This file gets memory for pages from the operating system (mmap), and gives it back when a page is freed. malloc
   would keep the freed memory in the process, and the system would report this memory as used. */
#define _GNU_SOURCE /* for MAP_ANONYMOUS under -std=c11 */
#include "rvm.h"

#include <sys/mman.h>

uint8_t *rvm_page_make(size_t bytes) {
    if (bytes == 0) return NULL;
    void *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return NULL;
#ifdef MADV_HUGEPAGE
    madvise(page, bytes, MADV_HUGEPAGE); /* huge pages of the system waste little memory, because the decoder writes all over a KV page */
#endif
    return page;
}

void rvm_page_free(uint8_t *page, size_t bytes) {
    if (page) munmap(page, bytes);
}
