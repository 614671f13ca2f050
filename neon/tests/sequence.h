/* This header makes, demotes and drops the KV pages of a sequence, as a caller of the decoder does. */
#ifndef RVM_SEQUENCE_H
#define RVM_SEQUENCE_H

#include "rvm.h"

#include <stdlib.h>

#ifdef SEQUENCE_MALLOC /* use the C library's memory, because sanitizers know where its blocks end */
static inline uint8_t *page_make(size_t bytes) { return aligned_alloc(64, bytes); }
static inline void page_free(uint8_t *page, size_t bytes) { free(page), (void)bytes; }
#else
static inline uint8_t *page_make(size_t bytes) { return rvm_page_make(bytes); }
static inline void page_free(uint8_t *page, size_t bytes) { rvm_page_free(page, bytes); }
#endif

typedef struct {
    rvm_decoder *d;
    rvm_page *pages;
    size_t room, first, end, offset; /* room: maximum number of pages; the pages [first, end) exist; offset: number of tokens */
    size_t window, keep;             /* keep: number of newest tokens that the window and a trim can need; 0: all tokens */
    size_t hot, warm;                /* hot, warm: the ages in tokens at which a page becomes warm and cold; 0: never */
} sequence;

static inline sequence sequence_of(rvm_decoder *d, size_t tokens) {
    const size_t room = (tokens + RVM_PAGE_TOKENS - 1) / RVM_PAGE_TOKENS;
    return (sequence){.d = d, .pages = calloc(room, sizeof(rvm_page)), .room = room};
}

static inline void sequence_drop(sequence *s, size_t i) {
    page_free(s->pages[i].data, rvm_decoder_page_bytes(s->d, (rvm_tier)s->pages[i].tier));
    s->pages[i].data = NULL;
}

static inline void sequence_end(sequence *s) {
    for (size_t i = s->first; i < s->end; i++) sequence_drop(s, i);
    free(s->pages);
    *s = (sequence){0};
}

static inline int sequence_demote(sequence *s, size_t i, rvm_tier tier) {
    const rvm_page to = {page_make(rvm_decoder_page_bytes(s->d, tier)), tier, 0};
    const int rc = to.data ? rvm_decoder_demote(s->d, s->pages + i, &to) : RVM_NO_MEMORY;
    sequence_drop(s, i);
    s->pages[i] = to;
    return rc;
}

static inline int is_older(const sequence *s, size_t i, size_t age) {
    return age && s->offset + 1 >= age + (i + 1) * RVM_PAGE_TOKENS;
}

/* Make hot pages for n more tokens, and demote or drop old pages of the sequence. */
static inline int sequence_reserve(sequence *s, size_t n) {
    int rc = RVM_OK;
    if (s->offset + n > s->room * RVM_PAGE_TOKENS) return RVM_NO_MEMORY;
    for (; s->keep && is_older(s, s->first, s->keep); s->first++) sequence_drop(s, s->first);
    for (size_t i = s->first; i < s->end && is_older(s, i, s->hot) && rc == RVM_OK; i++) {
        const rvm_tier tier = is_older(s, i, s->warm) ? RVM_COLD : RVM_WARM;
        if (s->pages[i].tier > tier) rc = sequence_demote(s, i, tier);
    }
    for (; rc == RVM_OK && s->end * RVM_PAGE_TOKENS < s->offset + n; s->end++) {
        s->pages[s->end] = (rvm_page){page_make(rvm_decoder_page_bytes(s->d, RVM_HOT)), RVM_HOT, 0};
        if (!s->pages[s->end].data) return RVM_NO_MEMORY;
    }
    return rc;
}

static inline int sequence_forward(sequence *s, const int32_t *tokens, size_t n, size_t outputs, float *hidden,
                                   float *logits, const int *cancel) {
    int rc = sequence_reserve(s, n);
    if (rc == RVM_OK) rc = rvm_decoder_forward(s->d, s->pages, s->offset, tokens, n, outputs, hidden, logits, cancel);
    if (rc == RVM_OK) s->offset += n;
    return rc;
}

/* Remove the newest n tokens of the sequence; their pages must be hot. */
static inline void sequence_trim(sequence *s, size_t n) {
    s->offset -= n;
    while (s->end > s->first && (s->end - 1) * RVM_PAGE_TOKENS >= s->offset) sequence_drop(s, --s->end);
}

#endif
