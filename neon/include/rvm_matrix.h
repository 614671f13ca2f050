/* Part of rvm.h, which includes it. */
#ifndef RVM_PUBLIC_MATRIX_H
#define RVM_PUBLIC_MATRIX_H

/* Matrices: y = x @ W^T with W 4-bit, 8-bit or float
 *
 * W [rows = out, cols = in] is packed once into an interleaved form that every implementation reads and
 * that may be written to a file and mapped back: it holds no pointers. Memory for a packed matrix and for
 * activations is the caller's and starts at a multiple of 64 bytes (huge pages are worth 3-8%); x, y, and
 * what is packed may lie anywhere.
 *
 *   rvm_matrix_spec spec;
 *   rvm_matrix_plan(RVM_Q4, rows, cols, 64, scales, biases, RVM_BF16, &spec);
 *   void *w = aligned_alloc(64, rvm_matrix_bytes(&spec));
 *   rvm_matrix_pack(&spec, weights, scales, biases, RVM_BF16, 0, rows, w);
 *
 *   const rvm_matmul *m = rvm_matmul_impl(NULL);
 *   void *acts = aligned_alloc(64, rvm_acts_bytes(RVM_ACTS_16, tokens, cols));
 *   m->acts(RVM_ACTS_16, x, cols, tokens, cols, 0, tokens, acts);
 *   m->matmul(w, RVM_ACTS_16, acts, tokens, 0, rvm_matrix_tiles(w), y, rows);
 *
 * Quantised weights (MLX's affine form): W[n][k] = s[n][g] * q[n][k] + b[n][g], g = k / group. Activations
 * become integers with one scale d per token and 32 columns, of -127..127 (8 bits) or -32385..32385 (16); then
 *   y[n] = sum_j d_j * (s[n][g] * (q . xhat)_j + b[n][g] * sum(xhat)_j)      j over blocks of 32 columns
 * summed in this order by every implementation: all agree bit for bit, at any number of tokens and
 * any split. Before super-blocks an activation has one scale per token and 256 columns, a super-block; their scales and
 * lows are integers, and multiply and add as such. Q4_K and Q5_K (groups g of 32), and Q6_K (of 16):
 *   y[n] = sum_j d_j * (d[n][j] * sum_g scale[n][g] * (q . xhat)_g - dmin[n][j] * sum_g low[n][g] * sum(xhat)_g)
 *   y[n] = sum_j d_j * d[n][j] * sum_g scale[n][g] * ((q - 32) . xhat)_g
 * A NaN or an infinity in x makes the whole row of y NaN; |x| < 1e-30 counts as 0. */

typedef enum {
    RVM_Q4 = 0,
    RVM_Q8 = 1,
    RVM_F16 = 2,
    RVM_BF16 = 3,
    RVM_F32 = 4,
    RVM_Q4_K = 5, /* GGUF's super-blocks of 256 columns, in as many bytes */
    RVM_Q5_K = 6,
    RVM_Q6_K = 7
} rvm_kind;

/* What becomes of x: float before float kinds, 8 or 16 bits before quantised ones. The error of a product, as
 * part of its spread, of normal activations: 0.6% with 8 bits, 2e-5 with 16; before super-blocks 0.7% and 2.7e-5. */
typedef enum {
    RVM_ACTS_8 = 8,
    RVM_ACTS_16 = 16,
    RVM_ACTS_FLOAT = 32,
    RVM_ACTS_SUPER_8 = 256 + 8, /* before super-blocks: with one scale per 256 columns instead of 32 */
    RVM_ACTS_SUPER_16 = 256 + 16
} rvm_acts_kind;

enum { RVM_TILE_ROWS = 16, RVM_ALIGNMENT = 64 };

/* How a matrix is stored. To pack several with equal cols and group below each other as one, plan each,
 * then: rows = the sum, affine = any of them, scale_kind = theirs if equal, else RVM_F32. */
typedef struct {
    uint32_t kind;       /* rvm_kind */
    uint32_t scale_kind; /* RVM_F16, RVM_BF16 or RVM_F32; quantised kinds only */
    uint32_t affine;     /* 0: no biases are stored, for each is -8 * s (4 bits) or -128 * s (8 bits) */
    uint32_t group;      /* columns to a scale: 32, 64 or 128; 0 for float kinds; 256 for super-blocks */
    uint64_t rows, cols; /* cols: a multiple of group; any for float kinds */
} rvm_matrix_spec;

typedef struct rvm_matrix rvm_matrix; /* starts a packed matrix */

/* The smallest lossless form for these scales and biases [rows, cols / group] of type scale_kind.
 * biases may be NULL: symmetric. For float kinds and super-blocks group, scales and biases are ignored. */
RVM_API int rvm_matrix_plan(rvm_kind kind, size_t rows, size_t cols, size_t group, const void *scales,
                            const void *biases, rvm_kind scale_kind, rvm_matrix_spec *spec);

/* Bytes that a packed matrix takes, a multiple of 64; 0 for a spec that is refused. */
RVM_API size_t rvm_matrix_bytes(const rvm_matrix_spec *spec);

/* Pack rows [row_begin, row_end) of the matrix. The pointers are to row row_begin's data:
 *   weights: Q4, Q8: uint32 [n, cols * bits / 32], lowest bits first      F16, BF16, F32: [n, cols]
 *            Q4_K, Q5_K, Q6_K: GGUF blocks [n, cols / 256] of 144, 176 or 210 bytes
 *   scales, biases: [n, cols / group] of type scale_kind; biases may be NULL if spec->affine is 0
 * row_begin is a multiple of 16, row_end too unless it is the last row. Ranges may be packed by several
 * threads; the one that begins at 0 also writes the head, without which accessors return 0. */
RVM_API int rvm_matrix_pack(const rvm_matrix_spec *spec, const void *weights, const void *scales,
                            const void *biases, rvm_kind scale_kind, size_t row_begin, size_t row_end,
                            void *memory);

/* Is this a packed matrix, and do its claims about itself fit into `bytes`? For mapped files. */
RVM_API int rvm_matrix_check(const void *memory, size_t bytes);

RVM_API rvm_kind rvm_matrix_kind(const rvm_matrix *w);
RVM_API size_t rvm_matrix_rows(const rvm_matrix *w);
RVM_API size_t rvm_matrix_cols(const rvm_matrix *w);
RVM_API size_t rvm_matrix_tiles(const rvm_matrix *w); /* ceil(rows / 16) */

/* The kind of activations of 8 or 16 bits that this matrix multiplies; float for float kinds. 0: no such kind. */
RVM_API rvm_acts_kind rvm_matrix_acts(const rvm_matrix *w, int bits);

/* out[cols] = row `row` of W, as MLX dequantises it: embedding lookup. */
RVM_API int rvm_matrix_row(const rvm_matrix *w, size_t row, float *out);

/* Bytes for the activations of `tokens` tokens; 0 for sizes that are refused. */
RVM_API size_t rvm_acts_bytes(rvm_acts_kind kind, size_t tokens, size_t cols);

typedef struct {
    const char *name; /* "scalar", "avx2", "avxvnni" .. */

    /* Activations of tokens [token_begin, token_end) out of `tokens`, into their place in acts, which is
     * one for all: threads may share the work. x: [tokens, x_stride], the first cols of each row. */
    int (*acts)(rvm_acts_kind kind, const float *x, size_t x_stride, size_t tokens, size_t cols,
                size_t token_begin, size_t token_end, void *acts);

    /* y[t][n] = sum_k x[t][k] * W[n][k] for rows n of the tiles [tile_begin, tile_end): threads share the
     * tiles. kind: what acts were made as. y: [tokens, y_stride]; only real rows are written. */
    int (*matmul)(const rvm_matrix *w, rvm_acts_kind kind, const void *acts, size_t tokens, size_t tile_begin,
                  size_t tile_end, float *y, size_t y_stride);

    /* Attention over one head-page of codes, in integers ("Pages", below; tier: rvm_tier). Queries and weights
     * become integers of 7 bits (one term) or 15 bits (two terms), with one scale a row; all implementations agree
     * bit for bit. A NaN or an infinity makes its whole row NaN.
     *   page_queries  q [rows][head_dim], rotated if the tier's keys are -> codes [rvm_page_codes_bytes]
     *   page_scores   scores[r][t] = q_r . k_t                    [rows][RVM_PAGE_TOKENS], all 64 tokens
     *   page_values   sum[r][d] += sum_t p[r][t] v_t[d]           p as scores; p >= 0
     * sum: rows of `stride` floats: head_dim rounded up to 16, then 16 more, whose sum is to be added to every
     * dimension. soon: a head-page of the same size to be prefetched, or NULL. */
    int (*page_queries)(int tier, const float *q, size_t rows, size_t head_dim, void *codes);
    int (*page_scores)(int tier, const uint8_t *page, const void *codes, size_t rows, size_t head_dim,
                       const uint8_t *soon, float *scores);
    int (*page_values)(int tier, const uint8_t *page, const float *p, size_t rows, size_t head_dim,
                       const uint8_t *soon, float *sum, size_t stride);

    /* So many rounds of the loop inside matmul, over one block that never leaves the L1 cache: the most that a
     * product of 4-bit weights can do here. Returns how many products of two numbers that were. */
    uint64_t (*peak)(uint64_t rounds, int32_t *sum);
} rvm_matmul;

/* Bytes of page_queries' result, for its own implementation only; 0 for sizes that are refused. */
RVM_API size_t rvm_page_codes_bytes(int tier, size_t rows, size_t head_dim);

/* As rvm_impl and rvm_impl_name; there are more implementations of these. */
RVM_API const rvm_matmul *rvm_matmul_impl(const char *name);
RVM_API const char *rvm_matmul_impl_name(size_t index);

/* Name of the rvm_kernels whose layers run beside these matrices: "avx2" for "avxvnni". NULL for an unknown one. */
RVM_API const char *rvm_matmul_layers(const rvm_matmul *matmul);

#endif
