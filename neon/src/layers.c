/* What lies between a decoder's matrix products; formulas in rvm.h, "layers".  Compiled once per
 * instruction set, with -DRVM_IMPL=<name>; exports the one table rvm_layers_<name>. */
#include "rvm.h"

#include "demote.h"
#include "lanes.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

#define REQUIRE(condition) \
    if (!(condition)) return RVM_BAD_ARGUMENT

enum { PAGE = RVM_PAGE_TOKENS, ROWS = 6 };

static int k_rms_norm(const float *x, const float *weight, float eps, size_t tokens, size_t dim, float *y) {
    REQUIRE(x && weight && y && tokens && dim);
    for (; tokens--; x += dim, y += dim) {
        const float scale = 1.0f / sqrtf(dot_of(x, x, dim) / (float)dim + eps);
        SIMD()
        for (size_t i = 0; i < dim; i++) y[i] = x[i] * scale * weight[i];
    }
    return RVM_OK;
}

/* y = x turned by the angles of one position.  turn: cos [half], then sin [half]. */
static void rope_head(const float *restrict x, const float *restrict turn, size_t half, float scale,
                      float *restrict y) {
    const float *c = turn, *s = turn + half;
    SIMD()
    for (size_t i = 0; i < half; i++) {
        y[i] = scale * (x[i] * c[i] - x[i + half] * s[i]);
        y[i + half] = scale * (x[i] * s[i] + x[i + half] * c[i]);
    }
}

static void rope_pairs(const float *restrict x, const float *restrict turn, size_t half, float *restrict y) {
    const float *c = turn, *s = turn + half;
    for (size_t i = 0; i < half; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        y[2 * i] = a * c[i] - b * s[i];
        y[2 * i + 1] = a * s[i] + b * c[i];
    }
}

static int k_rope(const float *x, const float *turn, size_t tokens, size_t heads, size_t head_dim,
                  int traditional, float *y) {
    REQUIRE(x && turn && y && tokens && heads && head_dim && head_dim % 2 == 0);
    for (size_t t = 0; t < tokens; t++, turn += head_dim)
        for (size_t h = 0; h < heads; h++, x += head_dim, y += head_dim)
            if (traditional)
                rope_pairs(x, turn, head_dim / 2, y);
            else
                rope_head(x, turn, head_dim / 2, 1.0f, y);
    return RVM_OK;
}

static int k_swiglu(const float *gate, const float *up, size_t n, float *y) {
    REQUIRE(gate && up && y && n);
    SIMD()
    for (size_t i = 0; i < n; i++) y[i] = gate[i] / (1.0f + exp_f32(-gate[i])) * up[i];
    return RVM_OK;
}

static int k_softmax(const float *x, size_t n, float *y) {
    REQUIRE(x && y && n);
    const float top = max_of(x, n, -FLT_MAX);
    float sum = 0;
    for (size_t i = 0; i < n; i += BLOCK) sum += exp_sum(x + i, top, min_size(BLOCK, n - i), y + i);
    if (!(sum > 0 && sum <= FLT_MAX)) return RVM_NOT_FINITE;
    const float scale = 1.0f / sum;
    SIMD()
    for (size_t i = 0; i < n; i++) y[i] *= scale;
    return RVM_OK;
}

static int has_nan(const float *x, size_t n) {
    uint32_t top = 0;
    SIMD(reduction(max : top))
    for (size_t i = 0; i < n; i++) {
        uint32_t m = magnitude(x[i]);
        top = m > top ? m : top;
    }
    return top > 0x7f800000u;
}

static int k_argmax(const float *x, size_t n, size_t *index) {
    REQUIRE(x && n && index);
    if (has_nan(x, n)) return RVM_NOT_FINITE;
    const float top = max_of(x, n, -INFINITY);
    for (*index = 0; x[*index] != top;) ++*index;
    return RVM_OK;
}

/* Keep the k best so far in order; most blocks hold nothing better than the worst of them. */
static int k_top_k(const float *x, size_t n, size_t k, uint32_t *index) {
    REQUIRE(x && index && n && k && k <= n && n <= UINT32_MAX);
    if (has_nan(x, n)) return RVM_NOT_FINITE;
    enum { STEP = 64 };
    size_t held = 0;
    for (size_t i = 0; i < n; i += STEP) {
        const size_t stop = min_size(n, i + STEP);
        if (held == k && !(max_of(x + i, stop - i, -INFINITY) > x[index[k - 1]])) continue;
        for (size_t j = i; j < stop; j++) {
            if (held == k && !(x[j] > x[index[k - 1]])) continue;
            size_t at = held < k ? held++ : k - 1;
            for (; at && x[index[at - 1]] < x[j]; at--) index[at] = index[at - 1];
            index[at] = (uint32_t)j;
        }
    }
    return RVM_OK;
}

static int k_to_half(const float *x, size_t n, uint16_t *y) {
    REQUIRE(x && y && n);
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) l_store_half(y + i, l_load(x + i));
    for (; i < n; i++) y[i] = float_to_half(x[i]);
    return RVM_OK;
}

static int k_from_half(const uint16_t *x, size_t n, float *y) {
    REQUIRE(x && y && n);
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) l_store(y + i, l_load_half(x + i));
    for (; i < n; i++) y[i] = half_to_float(x[i]);
    return RVM_OK;
}

/* Divides and rounds exactly as rvm_matmul's acts does, or the two would not add up. */
static int k_residual(const float *x, size_t n, float *rest) {
    REQUIRE(x && rest && n && n % 32 == 0);
    for (size_t i = 0; i < n; i += 32) {
        uint32_t top = 0;
        SIMD(reduction(max : top))
        for (size_t j = 0; j < 32; j++) {
            uint32_t m = magnitude(x[i + j]);
            top = m > top ? m : top;
        }
        const float most = float_of(top);
        const float step = most < 1e-30f ? 0.0f : most / 127.0f, inverse = most < 1e-30f ? 0.0f : 127.0f / most;
        SIMD()
        for (size_t j = 0; j < 32; j++) {
            const float scaled = x[i + j] * inverse; /* rounded before rintf: no fma can join the two */
            rest[i + j] = x[i + j] - step * rintf(scaled);
        }
    }
    return RVM_OK;
}

static int k_lora_project(const float *x, const float *lora_a, float s, size_t tokens, size_t in, size_t rank,
                          float *u) {
    REQUIRE(x && lora_a && u && tokens && in && rank && rank <= RVM_MAX_RANK);
    for (size_t t = 0; t < tokens; t++) project(u + t * rank, x + t * in, lora_a, s, in, rank);
    return RVM_OK;
}

static int k_lora_add(const float *u, const float *lora_b, size_t tokens, size_t rank, size_t out,
                      size_t first, size_t n, float *y, size_t stride) {
    REQUIRE(u && lora_b && y && tokens && n && rank && rank <= RVM_MAX_RANK && first + n <= out);
    float c[RVM_MAX_RANK]; /* of its own: clang then sees that y does not overlap it */
    for (size_t i = 0; i < n; i += BLOCK) /* a block of B stays in L1 for all tokens */
        for (size_t t = 0; t < tokens; t++) {
            memcpy(c, u + t * rank, rank * sizeof *c);
            add_rows(y + t * stride + i, lora_b + first + i, out, c, rank, min_size(BLOCK, n - i));
        }
    return RVM_OK;
}

/* Attention -------------------------------------------------------------------------------------- */

/* c[m][n] = a[m][k] @ b[k][n]  (or +=), for the rows and vectors that fit in registers.
 * b: float, or half that is converted on the way.  m, vectors and half are constants where it is used.
 * soon: what will be read next, as large as b; fetched on the way. Keys and values were last read a token
 * ago and come from memory: without this they arrive at half the speed. */
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

/* c[m][n] = a[m][k] @ b[k][n]  (or +=).  n: a multiple of LANES.  A column block of b stays in L1. */
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

/* One block of queries on its way over the pages: rows are queries x the heads of a group. */
typedef struct {
    float *q;      /* [rows][head_dim] turned, times 1 / sqrt(head_dim) */
    float *scores; /* [rows][PAGE] */
    float *sum;    /* [rows][width], O of the online softmax */
    float *most;   /* [rows] m */
    float *total;  /* [rows] l */
    float *keys, *values; /* a page as float, when that pays */
} flash;

static size_t padded(size_t head_dim) { return (head_dim + 15) / 16 * 16; }

static flash flash_at(float *scratch, size_t rows, size_t head_dim) {
    const size_t width = padded(head_dim);
    flash f = {.q = scratch};
    f.scores = f.q + rows * width;
    f.sum = f.scores + rows * PAGE;
    f.most = f.sum + rows * width;
    f.total = f.most + rows;
    f.keys = f.total + rows;
    f.values = f.keys + PAGE * width;
    return f;
}

static void flash_begin(const flash *f, const rvm_attention *a, float scale) {
    const size_t rows = a->queries * a->group, width = padded(a->head_dim);
    for (size_t r = 0; r < rows; r++) {
        const size_t t = r / a->group, h = r % a->group;
        rope_head(a->q + t * a->q_stride + h * a->head_dim, a->turn + t * a->head_dim, a->head_dim / 2, scale,
                  f->q + r * a->head_dim);
        f->most[r] = -FLT_MAX;
        f->total[r] = 0;
    }
    memset(f->sum, 0, rows * width * sizeof *f->sum);
}

/* scores -> e^(scores - m) for the tokens [begin, end) of a page, 0 for the others; l and O follow. */
static void flash_row(const flash *f, size_t r, size_t begin, size_t end, size_t width) {
    float *s = f->scores + r * PAGE, *sum = f->sum + r * width;
    for (size_t i = 0; i < begin; i++) s[i] = -INFINITY;
    for (size_t i = end; i < PAGE; i++) s[i] = -INFINITY;
    const float most = max_of(s, PAGE, f->most[r]);
    if (most > f->most[r]) {
        const float keep = exp_f32(f->most[r] - most);
        f->most[r] = most;
        f->total[r] *= keep;
        SIMD()
        for (size_t i = 0; i < width; i++) sum[i] *= keep;
    }
    f->total[r] += exp_sum(s, most, PAGE, s);
}

/* Which tokens of the page that begins at position `start` a query at `position` sees: [*begin, *end). */
static void seen(const rvm_attention *a, size_t position, size_t start, size_t *begin, size_t *end) {
    const size_t oldest = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
    *begin = oldest > start ? min_size(oldest - start, PAGE) : 0;
    *end = position < start ? 0 : min_size(position - start + 1, PAGE);
    if (*begin > *end) *begin = *end;
}

static void fetch(const void *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i);
}

/* The head's part of page i. */
static const uint8_t *head_page(const rvm_attention *a, size_t i) {
    return a->pages[i].data + a->head * rvm_head_page_bytes((rvm_tier)a->pages[i].tier, a->head_dim);
}

static void flash_page(const flash *f, const rvm_attention *a, size_t page) {
    const size_t rows = a->queries * a->group, hd = a->head_dim, width = padded(hd), start = page * PAGE;
    const uint16_t *keys = (const uint16_t *)head_page(a, page), *values = keys + PAGE * hd;
    const size_t last = a->position + a->queries - 1;
    if (last < start) return;
    const size_t skip = a->position < start ? (start - a->position) * a->group : 0; /* older than the page */
    const size_t tokens = min_size(PAGE, last - start + 1);
    const int half = rows <= 2 * ROWS;
    const void *k = keys, *v = values, *next = head_page(a, page + (page + 1 < a->end_page));
    if (!half) {
        k_from_half(keys, hd * PAGE, f->keys);
        k_from_half(values, tokens * width, f->values);
        k = f->keys, v = f->values;
        fetch(next, 2 * (hd + width) * PAGE);
    }
    product(f->q + skip * hd, hd, k, PAGE, values, hd, f->scores + skip * PAGE, PAGE, 0, rows - skip, PAGE, half);
    for (size_t r = skip; r < rows; r++) {
        size_t begin, end;
        seen(a, a->position + r / a->group, start, &begin, &end);
        flash_row(f, r, begin, end, width);
    }
    product(f->scores + skip * PAGE, PAGE, v, width, next, tokens, f->sum + skip * width, width, 1, rows - skip,
            width, half);
}

static void flash_out(const flash *f, const rvm_attention *a) {
    const size_t rows = a->queries * a->group, hd = a->head_dim, width = padded(hd);
    for (size_t r = 0; r < rows; r++) {
        const float *sum = f->sum + r * width;
        if (a->partial) {
            float *p = a->partial + r * RVM_PARTIAL(hd);
            memcpy(p, sum, hd * sizeof *p);
            p[hd] = f->most[r], p[hd + 1] = f->total[r];
            continue;
        }
        const float scale = 1.0f / f->total[r];
        float *out = a->out + r / a->group * a->out_stride + r % a->group * hd;
        SIMD()
        for (size_t i = 0; i < hd; i++) out[i] = sum[i] * scale;
    }
}

static int k_attend(const rvm_attention *a) {
    REQUIRE(a && a->pages && a->q && a->turn && a->scratch && (a->out || a->partial));
    REQUIRE(a->group && a->queries && a->head_dim && a->head_dim % 2 == 0 && a->first_page < a->end_page);
    const flash f = flash_at(a->scratch, a->queries * a->group, a->head_dim);
    fetch(head_page(a, a->first_page), 2 * PAGE * a->head_dim);
    flash_begin(&f, a, 1.0f / sqrtf((float)a->head_dim));
    for (size_t page = a->first_page; page < a->end_page; page++) flash_page(&f, a, page);
    flash_out(&f, a);
    return RVM_OK;
}

static int k_merge(const float *partial, size_t parts, size_t stride, size_t rows, size_t head_dim, float *out) {
    REQUIRE(partial && out && parts && rows && head_dim);
    for (size_t r = 0; r < rows; r++, partial += RVM_PARTIAL(head_dim), out += head_dim) {
        float most = -FLT_MAX, total = 0;
        for (size_t i = 0; i < parts; i++) most = fmaxf(most, partial[i * stride + head_dim]);
        for (size_t i = 0; i < parts; i++) {
            const float *p = partial + i * stride, keep = exp_f32(p[head_dim] - most);
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

static int k_append(const float *k, const float *v, size_t stride, const float *turn, size_t tokens,
                    size_t head_dim, size_t at, uint16_t *keys, uint16_t *values) {
    REQUIRE(k && v && turn && keys && values && tokens && at + tokens <= PAGE);
    REQUIRE(head_dim && head_dim % 2 == 0 && head_dim <= RVM_MAX_HEAD_DIM);
    const size_t width = padded(head_dim);
    float turned[RVM_MAX_HEAD_DIM];
    uint16_t halves[RVM_MAX_HEAD_DIM];
    for (size_t t = 0; t < tokens; t++) {
        rope_head(k + t * stride, turn + t * head_dim, head_dim / 2, 1.0f, turned);
        k_to_half(turned, head_dim, halves);
        for (size_t d = 0; d < head_dim; d++) keys[d * PAGE + at + t] = halves[d];
        k_to_half(v + t * stride, head_dim, values + (at + t) * width);
    }
    return RVM_OK;
}

const rvm_layers JOIN(rvm_layers_, RVM_IMPL) = {
    .name = TEXT(RVM_IMPL),
    .rms_norm = k_rms_norm,
    .rope = k_rope,
    .swiglu = k_swiglu,
    .softmax = k_softmax,
    .argmax = k_argmax,
    .top_k = k_top_k,
    .to_half = k_to_half,
    .from_half = k_from_half,
    .residual = k_residual,
    .lora_project = k_lora_project,
    .lora_add = k_lora_add,
    .append = k_append,
    .attend = k_attend,
    .merge = k_merge,
    .demote = DEMOTE,
};
