/* Keys and values of one sequence.  Layout: decoder.h and rvm.h, "layers". */
#define _GNU_SOURCE /* MAP_ANONYMOUS under -std=c11 */
#include "decoder.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SLACK = 256, FIRST_ROOM = 2048 };

rvm_cache *rvm_cache_create(const rvm_decoder *d) {
    if (!d) return NULL;
    const rvm_decoder_config *config = &d->config;
    rvm_cache *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->head_bytes = rvm_head_page_bytes(RVM_HOT, config->head_dim);
    c->n_kv_heads = config->n_kv_heads;
    c->page_bytes = c->head_bytes * config->n_kv_heads * config->n_layers;
    c->window = config->sliding_window;
    c->room = FIRST_ROOM;
    c->pages = calloc(c->room, sizeof *c->pages);
    if (c->pages) return c;
    free(c);
    return NULL;
}

/* Straight from the system: memory that malloc keeps would not show as free. */
static uint8_t *map_page(rvm_cache *c) {
    uint8_t *page = c->spare;
    c->spare = NULL;
    if (page) return page;
    page = mmap(NULL, c->page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return page == MAP_FAILED ? NULL : page;
}

static void drop_page(rvm_cache *c, size_t i, int keep_spare) {
    if (keep_spare && !c->spare) c->spare = c->pages[i].data;
    else munmap(c->pages[i].data, c->page_bytes);
    c->pages[i].data = NULL;
}

void rvm_cache_destroy(rvm_cache *c) {
    if (!c) return;
    for (size_t i = c->first; i < c->end; i++) drop_page(c, i, 0);
    if (c->spare) munmap(c->spare, c->page_bytes);
    free(c->pages);
    free(c);
}

static int grow_table(rvm_cache *c, size_t end) {
    size_t room = c->room;
    while (room < end) room *= 2;
    if (room == c->room) return RVM_OK;
    rvm_page *pages = realloc(c->pages, room * sizeof *pages);
    if (!pages) return RVM_NO_MEMORY;
    memset(pages + c->room, 0, (room - c->room) * sizeof *pages);
    c->pages = pages, c->room = room;
    return RVM_OK;
}

/* The oldest token that the window, and a trim of up to SLACK tokens, may still need. */
static size_t oldest(const rvm_cache *c) {
    const size_t keep = c->window - 1 + SLACK;
    return c->window && c->offset > keep ? c->offset - keep : 0;
}

int cache_reserve(rvm_cache *c, size_t n) {
    const size_t end = (c->offset + n + PAGE - 1) / PAGE;
    if (grow_table(c, end) != RVM_OK) return RVM_NO_MEMORY;
    for (; (c->first + 1) * PAGE <= oldest(c); c->first++) drop_page(c, c->first, 1);
    for (; c->end < end; c->end++)
        if (!(c->pages[c->end] = (rvm_page){map_page(c), RVM_HOT, 0}).data) return RVM_NO_MEMORY;
    return RVM_OK;
}

size_t rvm_cache_offset(const rvm_cache *c) { return c ? c->offset : 0; }

size_t rvm_cache_bytes(const rvm_cache *c) {
    return c ? (c->end - c->first + (c->spare != NULL)) * c->page_bytes : 0;
}

int rvm_cache_trim(rvm_cache *c, size_t n) {
    if (!c || n > c->offset) return RVM_BAD_ARGUMENT;
    const size_t left = c->offset - n, held = c->first * PAGE;
    if (held && left < held + c->window - 1) return RVM_BAD_ARGUMENT;
    c->offset = left;
    for (const size_t end = (left + PAGE - 1) / PAGE; c->end > end && c->end > c->first;)
        drop_page(c, --c->end, 1);
    return RVM_OK;
}
