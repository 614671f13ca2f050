/* This file computes attention over pages (rvm_layers.h) with an online softmax. After each page the code corrects the
 * maximum m, the sum l and the output O, so the code never stores the scores of all pages together. Hot pages store
 * 16-bit floats, which the code multiplies in float. Older pages store integers (codes); for these pages the code calls
 * the matrix kernels (page_kernel.h). The build compiles this file once for each instruction set. */
#include "layers.h"
#include "page_terms.h"

enum { PAGE = RVM_PAGE_TOKENS, ROWS = 6 };
_Static_assert((int)ROW_SUMS == (int)SUMS && PAGE % SUMS == 0, "sums_add adds whole pages");

/* Compute c[m][n] = a[m][k] @ b[k][n]  (or +=) for as many rows and vectors as fit into the registers.
 * b: floats, or halves (if half is 1), which the function converts to floats while it reads them. The callers pass
 * constants for m, vectors and half, so the compiler makes a version without branches.
 * soon: the data that the caller reads next, as large as b; this function prefetches it if half is 1. The decoder last
 * read these keys and values for the previous token, so they are usually in memory and not in a cache. Without the
 * prefetch, reading them takes twice as long. */
static inline __attribute__((always_inline)) void tile(const float *a, size_t lda, const void *b, size_t ldb,
                                                       const char *soon, size_t k, float *c, size_t ldc, int add,
                                                       const int m, const int vectors, const int half) {
    lanes sum[ROWS][N_VECTORS], row[N_VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) sum[i][j] = add ? l_load(c + i * ldc + j * LANES) : l_set(0);
    for (size_t p = 0; p < k; p++) {
        if (half)
            for (size_t at = 0; at < 2 * (size_t)vectors * LANES; at += 64)
                __builtin_prefetch(soon + 2 * p * ldb + at);
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++)
            row[j] = half ? l_load_half((const uint16_t *)b + p * ldb + j * LANES)
                          : l_load((const float *)b + p * ldb + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < m; i++) {
            const lanes x = l_set(a[i * lda + p]);
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) sum[i][j] = l_fma(x, row[j], sum[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) l_store(c + i * ldc + j * LANES, sum[i][j]);
}

#define TILE(m, v, h) tile(a, lda, b, ldb, soon, k, c, ldc, add, m, v, h)
#define TILES(v, h) \
    switch (m) { \
    case 1: TILE(1, v, h); break; \
    case 2: TILE(2, v, h); break; \
    case 3: TILE(3, v, h); break; \
    case 4: TILE(4, v, h); break; \
    case 5: TILE(5, v, h); break; \
    default: TILE(6, v, h); \
    }

static void tile_any(const float *a, size_t lda, const void *b, size_t ldb, const char *soon, size_t k, float *c,
                     size_t ldc, int add, size_t m, int wide, int half) {
    if (wide && half) {
        TILES(N_VECTORS, 1)
    } else if (wide) {
        TILES(N_VECTORS, 0)
    } else if (half) {
        TILES(1, 1)
    } else {
        TILES(1, 0)
    }
}

/* Compute c[m][n] = a[m][k] @ b[k][n]  (or +=).  n: a multiple of LANES.  The function works on one block of columns of
 * b at a time, so that the block stays in the L1 cache. */
static void product(const float *a, size_t lda, const void *b, size_t ldb, const void *soon, size_t k, float *c,
                    size_t ldc, int add, size_t m, size_t n, int half) {
    for (size_t j = 0, step; j < n; j += step) {
        const int wide = n - j >= (size_t)N_VECTORS * LANES;
        step = wide ? (size_t)N_VECTORS * LANES : LANES;
        const void *from = half ? (const void *)((const uint16_t *)b + j) : (const void *)((const float *)b + j);
        for (size_t i = 0; i < m; i += ROWS)
            tile_any(a + i * lda, lda, from, ldb, (const char *)soon + 2 * j, k, c + i * ldc + j, ldc, add,
                     min_size(ROWS, m - i), wide, half);
    }
}

/* The state of the attention of one block of queries. A row is one query of one query head of the group that shares the
 * key-value head. The softmax uses powers of 2, which are faster than powers of e, so scores are logarithms to base 2.
 * */
typedef struct {
    size_t rows, stride;
    float *q;      /* q: [rows][head_dim], the queries after rope, times log2(e) / sqrt(head_dim) */
    float *scores; /* scores: [rows][PAGE], the scores of one page */
    float *sum;    /* sum: [rows][stride], the output O of the online softmax; the sum of a row's last 16 numbers is added to every dimension */
    float *most;   /* most: [rows], the maximum score m so far */
    float *total;  /* total: [rows][SUMS], the sum l of the softmax weights, in SUMS parts */
    float *keys, *values; /* keys, values: the keys and values of a hot page as floats, if there are more than 2 * ROWS rows */
    float *rotated;       /* rotated: [rows][head_dim], the rotated queries, before they become codes */
    uint8_t *codes[RVM_HOT]; /* codes: the queries as codes, for the pages of each tier with codes */
    uint8_t *own[RVM_HOT];   /* own: the codes of the queries of one sequence */
    int made[RVM_HOT];
} flash;

static flash flash_at(float *scratch, size_t rows, size_t head_dim) {
    const size_t width = value_rows(head_dim);
    flash f = {.q = scratch, .rows = rows, .stride = sum_width(head_dim)};
    f.scores = f.q + rows * width;
    f.sum = f.scores + rows * PAGE;
    f.most = f.sum + rows * f.stride;
    f.total = f.most + rows;
    f.keys = f.total + rows * SUMS;
    f.values = f.keys + PAGE * width;
    f.rotated = f.values + PAGE * width;
    uint8_t *codes = (uint8_t *)(f.rotated + rows * width);
    for (int tier = 0; tier < RVM_HOT; tier++) {
        const size_t bytes = rows * row_codes((rvm_tier)tier, head_dim);
        f.codes[tier] = codes;
        f.own[tier] = codes + bytes;
        codes += 2 * bytes;
    }
    return f;
}

/* Return the state of the rows that belong to query t alone. */
static flash flash_of(const flash *all, const rvm_attention *a, size_t t) {
    const size_t first = t * a->group;
    flash f = *all;
    f.rows = a->group;
    f.q += first * a->head_dim, f.rotated += first * a->head_dim;
    f.scores += first * PAGE, f.sum += first * f.stride;
    f.most += first, f.total += first * SUMS;
    for (int tier = 0; tier < RVM_HOT; tier++) f.codes[tier] = f.own[tier], f.made[tier] = 0;
    return f;
}

static void flash_begin(const flash *f, const rvm_attention *a, float scale) {
    for (size_t r = 0; r < f->rows; r++) {
        const size_t t = r / a->group, h = r % a->group;
        rope_head(a->q + t * a->q_stride + h * a->head_dim, a->turn + t * a->head_dim, a->head_dim / 2, scale,
                  f->q + r * a->head_dim);
        f->most[r] = -FLT_MAX;
    }
    memset(f->total, 0, f->rows * SUMS * sizeof *f->total);
    memset(f->sum, 0, f->rows * f->stride * sizeof *f->sum);
}

/* Turn a row's scores of a page into softmax weights 2^(score - m), and correct m, l and O of the online softmax. Only
 * the tokens [begin, end) of the page get weights; the weights of the page's other tokens become 0. */
static void flash_row(const flash *f, size_t r, size_t begin, size_t end) {
    float *s = f->scores + r * PAGE, *sum = f->sum + r * f->stride, *total = f->total + r * SUMS;
    for (size_t i = 0; i < begin; i++) s[i] = -INFINITY;
    for (size_t i = end; i < PAGE; i++) s[i] = -INFINITY;
    const float most = max_of(s, PAGE, f->most[r]);
    if (most > f->most[r]) {
        const float keep = exp2_down(f->most[r] - most);
        f->most[r] = most;
        SIMD()
        for (size_t i = 0; i < SUMS; i++) total[i] *= keep;
        SIMD()
        for (size_t i = 0; i < f->stride; i++) sum[i] *= keep;
    }
    SIMD()
    for (size_t i = 0; i < PAGE; i++) s[i] = exp2_down(s[i] - most);
    sums_add(total, s, PAGE);
}

/* Set [*begin, *end) to the tokens that the query at `position` sees in the page that begins at position `start`. */
static void seen(const rvm_attention *a, size_t position, size_t start, size_t *begin, size_t *end) {
    const size_t oldest = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
    *begin = oldest > start ? min_size(oldest - start, PAGE) : 0;
    *end = position < start ? 0 : min_size(position - start + 1, PAGE);
    if (*begin > *end) *begin = *end;
}

/* Add ALiBi's slope * (key's position - query's position) to the scores of a row. The scores are logarithms to base
 * 2. */
static void add_slope(float *s, float slope, size_t position, size_t start) {
    const float first = (float)((double)start - (double)position);
    slope *= (float)LOG2_E;
    SIMD()
    for (int i = 0; i < PAGE; i++) s[i] += slope * (first + (float)i);
}

static void fetch(const void *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i);
}

/* Return the head-page of page i: the part of the page for the head of this call. */
static const uint8_t *head_page(const rvm_attention *a, size_t i) {
    return a->pages[i].data + a->head * head_page_bytes((rvm_tier)a->pages[i].tier, a->head_dim);
}

/* Return the head-page that is n pages after page i, or the last head-page of the call if fewer pages follow. */
static const uint8_t *later_page(const rvm_attention *a, size_t i, size_t n) {
    return head_page(a, min_size(i + n, a->end_page - 1));
}

static size_t position_of(const rvm_attention *a, size_t t) { return a->rows ? a->position : a->position + t; }

/* Turn the scores of a page into softmax weights, for the rows from row `skip` on. */
static void flash_rows(const flash *f, const rvm_attention *a, size_t skip, size_t start) {
    for (size_t r = skip; r < f->rows; r++) {
        size_t begin, end;
        seen(a, position_of(a, r / a->group), start, &begin, &end);
        if (a->slopes) add_slope(f->scores + r * PAGE, a->slopes[r % a->group], position_of(a, r / a->group), start);
        flash_row(f, r, begin, end);
    }
}

static void flash_hot(const flash *f, const rvm_attention *a, size_t page) {
    const size_t rows = f->rows, hd = a->head_dim, width = value_rows(hd), start = page * PAGE;
    const uint16_t *keys = (const uint16_t *)head_page(a, page), *values = keys + PAGE * hd;
    const size_t last = position_of(a, a->queries - 1);
    if (last < start) return;
    const size_t skip = a->position < start ? (start - a->position) * a->group : 0; /* skip: the number of rows of queries older than the page */
    const size_t tokens = min_size(PAGE, last - start + 1);
    const int half = rows <= 2 * ROWS;
    const void *k = keys, *v = values, *next = later_page(a, page, 1);
    if (!half) {
        from_halves(keys, hd * PAGE, f->keys);
        from_halves(values, tokens * width, f->values);
        k = f->keys, v = f->values;
        fetch(next, 2 * (hd + width) * PAGE);
    }
    product(f->q + skip * hd, hd, k, PAGE, values, hd, f->scores + skip * PAGE, PAGE, 0, rows - skip, PAGE, half);
    flash_rows(f, a, skip, start);
    product(f->scores + skip * PAGE, PAGE, v, width, next, tokens, f->sum + skip * f->stride, f->stride, 1,
            rows - skip, width, half);
}

enum { SMALL = 16 };

/* Write the Hadamard matrix of 16 rows into m. The first n rows and columns are the Hadamard matrix of n rows, if n is
   a power of 2. */
static void hadamard(float m[SMALL][SMALL]) {
    for (int j = 0; j < SMALL; j++)
        for (int i = 0; i < SMALL; i++) {
            const int both = i & j, pairs = both ^ both >> 2;
            m[j][i] = (pairs ^ pairs >> 1) & 1 ? -1.0f : 1.0f;
        }
}

/* Multiply a row by a block-diagonal Hadamard matrix, as the keys of rotated tiers were multiplied
 * (metal_kernels/README.md). The last bit of a result can differ from the result for the same numbers as a key, so the
 * order of the sums is free here. The function multiplies blocks of 16 numbers by a matrix. Butterflies (sums and
 * differences of pairs) on 16 numbers would not fill a vector. */
static void rotate(const float *restrict x, size_t n, float m[SMALL][SMALL], float *restrict y) {
    const size_t block = hadamard_block(n), small = min_size(block, SMALL);
    const float norm = (float)(1 / sqrt((double)block));
    for (size_t first = 0; first < n; first += small) {
        float sum[SMALL] = {0};
        for (size_t j = 0; j < small; j++) {
            SIMD()
            for (size_t i = 0; i < SMALL; i++) sum[i] += x[first + j] * m[j][i];
        }
        for (size_t i = 0; i < small; i++) y[first + i] = norm * sum[i];
    }
    for (size_t h = SMALL; h < block; h *= 2)
        for (size_t first = 0; first < n; first += 2 * h) {
            SIMD()
            for (size_t i = first; i < first + h; i++) {
                const float a = y[i], b = y[i + h];
                y[i] = a + b, y[i + h] = a - b;
            }
        }
}

/* Compute the rotated queries into f->rotated, and return their address. */
static const float *rotated(const flash *f, size_t head_dim) {
    float m[SMALL][SMALL];
    hadamard(m);
    for (size_t r = 0; r < f->rows; r++) rotate(f->q + r * head_dim, head_dim, m, f->rotated + r * head_dim);
    return f->rotated;
}

/* Return the queries as codes for pages of this tier. The first call computes these codes, and later calls for the same
   tier return them. */
static const uint8_t *flash_codes(flash *f, const rvm_attention *a, rvm_tier tier) {
    if (f->made[tier]) return f->codes[tier];
    const float *q = TIERS[tier].rotated ? rotated(f, a->head_dim) : f->q;
    a->matmul->page_queries(tier, q, f->rows, a->head_dim, f->codes[tier]);
    f->made[tier] = 1;
    return f->codes[tier];
}

/* Add a page of codes to the attention. A page of codes always holds 64 tokens. flash_rows sets the softmax weights of
 * tokens that a query does not see to 0. */
static void flash_codes_page(flash *f, const rvm_attention *a, size_t page) {
    const rvm_tier tier = (rvm_tier)a->pages[page].tier;
    const uint8_t *data = head_page(a, page), *codes = flash_codes(f, a, tier);
    const uint8_t *soon = later_page(a, page, 2); /* soon: two pages ahead, because to read a page takes longer than to compute with it */
    a->matmul->page_scores(tier, data, codes, f->rows, a->head_dim, soon, f->scores);
    flash_rows(f, a, 0, page * PAGE);
    a->matmul->page_values(tier, data, f->scores, f->rows, a->head_dim, soon, f->sum, f->stride);
}

static void flash_out(const flash *f, const rvm_attention *a) {
    const size_t hd = a->head_dim, width = value_rows(hd);
    for (size_t r = 0; r < f->rows; r++) {
        float *sum = f->sum + r * f->stride, total = sums_total(f->total + r * SUMS), every = 0;
        for (size_t i = width; i < f->stride; i++) every += sum[i];
        if (a->partial) {
            float *p = a->partial + r * RVM_PARTIAL(hd);
            SIMD()
            for (size_t i = 0; i < hd; i++) p[i] = sum[i] + every;
            p[hd] = f->most[r], p[hd + 1] = total;
            continue;
        }
        const float scale = 1.0f / total;
        float *out = a->out + r / a->group * a->out_stride + r % a->group * hd;
        SIMD()
        for (size_t i = 0; i < hd; i++) out[i] = (sum[i] + every) * scale;
    }
}

static const rvm_page *pages_of(const rvm_attention *a, size_t t) { return a->rows ? a->rows[t].pages : a->pages; }

/* Return 1 if every page has data, and if there are kernels for every page with codes. */
static int good_pages(const rvm_attention *a) {
    for (size_t t = 0; t < (a->rows ? a->queries : 1); t++)
        for (size_t i = a->first_page; i < a->end_page; i++) {
            const rvm_page *p = pages_of(a, t) + i;
            if (!p->data || p->tier > RVM_HOT || (p->tier != RVM_HOT && !a->matmul)) return 0;
        }
    return 1;
}

/* Return 1 if page i of all sequences of the call is the same memory. */
static int is_shared(const rvm_attention *a, size_t i) {
    for (size_t t = 1; a->rows && t < a->queries; t++)
        if (a->rows[t].pages[i].data != a->pages[i].data) return 0;
    return 1;
}

static void flash_page(flash *f, const rvm_attention *a, size_t page) {
    if (a->pages[page].tier == RVM_HOT) flash_hot(f, a, page);
    else flash_codes_page(f, a, page);
}

/* Add to the attention a page that is different for each sequence. */
static void flash_own_pages(const flash *all, const rvm_attention *a, size_t page) {
    for (size_t t = 0; t < a->queries; t++) {
        flash f = flash_of(all, a, t);
        rvm_attention one = *a;
        one.pages = pages_of(a, t), one.rows = NULL, one.queries = 1;
        flash_page(&f, &one, page);
    }
}

int LAYER(attend)(const rvm_attention *a) {
    REQUIRE(a && a->pages && a->q && a->turn && a->scratch && (a->out || a->partial));
    REQUIRE(a->group && a->queries && good_head_dim(a->head_dim) && a->first_page < a->end_page && good_pages(a));
    flash f = flash_at(a->scratch, a->queries * a->group, a->head_dim);
    for (size_t i = a->first_page; i < min_size(a->first_page + 2, a->end_page); i++)
        fetch(head_page(a, i), head_page_bytes((rvm_tier)a->pages[i].tier, a->head_dim));
    flash_begin(&f, a, (float)(LOG2_E / sqrt((double)a->head_dim)));
    for (size_t page = a->first_page; page < a->end_page; page++) {
        if (is_shared(a, page)) flash_page(&f, a, page);
        else flash_own_pages(&f, a, page);
    }
    flash_out(&f, a);
    return RVM_OK;
}

int LAYER(merge)(const float *partial, size_t parts, size_t stride, size_t rows, size_t head_dim, float *out) {
    REQUIRE(partial && out && parts && rows && head_dim);
    for (size_t r = 0; r < rows; r++, partial += RVM_PARTIAL(head_dim), out += head_dim) {
        float most = -FLT_MAX, total = 0;
        for (size_t i = 0; i < parts; i++) most = fmaxf(most, partial[i * stride + head_dim]);
        for (size_t i = 0; i < parts; i++) {
            const float *p = partial + i * stride, keep = exp2_down(p[head_dim] - most);
            total += keep * p[head_dim + 1];
            SIMD()
            for (size_t d = 0; d < head_dim; d++) out[d] = (i ? out[d] : 0) + keep * p[d];
        }
        const float scale = 1.0f / total;
        SIMD()
        for (size_t d = 0; d < head_dim; d++) out[d] *= scale;
    }
    return RVM_OK;
}

int LAYER(append)(const float *k, const float *v, size_t stride, const float *turn, size_t tokens,
                    size_t head_dim, size_t at, uint16_t *keys, uint16_t *values) {
    REQUIRE(k && v && turn && keys && values && tokens && at + tokens <= PAGE);
    REQUIRE(good_head_dim(head_dim));
    const size_t width = value_rows(head_dim);
    float turned[RVM_MAX_HEAD_DIM];
    uint16_t halves[RVM_MAX_HEAD_DIM];
    for (size_t t = 0; t < tokens; t++) {
        rope_head(k + t * stride, turn + t * head_dim, head_dim / 2, 1.0f, turned);
        to_halves(turned, head_dim, halves);
        for (size_t d = 0; d < head_dim; d++) keys[d * PAGE + at + t] = halves[d];
        to_halves(v + t * stride, head_dim, values + (at + t) * width);
    }
    return RVM_OK;
}
