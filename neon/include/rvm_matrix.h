/* This header is a part of rvm.h, which includes it. */
#ifndef RVM_PUBLIC_MATRIX_H
#define RVM_PUBLIC_MATRIX_H

/* The functions of this header compute y = x @ W^T, in which the weights W have 4 to 8 bits or are floats.
 *
 * The caller packs W [rows = out, cols = in] once into an interleaved form that every implementation reads.
 * The packed form has no pointers, so the caller can write it to a file and map the file. The caller gives the memory for
 * a packed matrix and for activations. This memory starts at a multiple of 64 bytes (huge pages save 3-8% of the time);
 * x, y and the weights before packing need no alignment.
 *
 * Quantised weights (MLX's affine form) are W[n][k] = s[n][g] * q[n][k] + b[n][g], g = k / group. Activations
 * become integers xhat with one scale d per token and 32 columns, of -127..127 (8 bits) or -32385..32385 (16 bits).
 * The product is then
 *   y[n] = sum_j d_j * (s[n][g] * (q . xhat)_j + b[n][g] * sum(xhat)_j)      j over blocks of 32 columns.
 * Every implementation adds in this order, so the results have the same bits, for any number of tokens and any division
 * of the work among threads. GGUF's super-blocks have 256 columns, and their activations have one scale per token and
 * super-block. The scales and lows (minimums of groups) of super-blocks are integers, which the kernels multiply and
 * add as integers. The formula of Q4_K and Q5_K has groups g of 32 columns:
 *   y[n] = sum_j d_j * (d[n][j] * sum_g scale[n][g] * (q . xhat)_g - dmin[n][j] * sum_g low[n][g] * sum(xhat)_g).
 * The formula of Q6_K has groups g of 16 columns:
 *   y[n] = sum_j d_j * d[n][j] * sum_g scale[n][g] * ((q - 32) . xhat)_g.
 * With quantised weights, a NaN or an infinity in a row of x makes the same row of y NaN. If all |x| that share a scale
 * d are below 1e-30, they become 0.
 *
 * Example:
 *   rvm_matrix_spec spec;
 *   rvm_matrix_plan(RVM_Q4, rows, cols, 64, scales, biases, RVM_BF16, &spec);
 *   void *w = aligned_alloc(64, rvm_matrix_bytes(&spec));
 *   rvm_matrix_pack(&spec, weights, scales, biases, RVM_BF16, 0, rows, w);
 *
 *   const rvm_matmul *m = rvm_matmul_impl(NULL);
 *   void *acts = aligned_alloc(64, rvm_acts_bytes(RVM_ACTS_16, tokens, cols));
 *   m->acts(RVM_ACTS_16, x, cols, tokens, cols, 0, tokens, acts);
 *   m->matmul(w, RVM_ACTS_16, acts, tokens, 0, rvm_matrix_tiles(w), y, rows); */

typedef enum {
    RVM_Q4 = 0,
    RVM_Q8 = 1,
    RVM_F16 = 2,
    RVM_BF16 = 3,
    RVM_F32 = 4,
    RVM_Q4_K = 5, /* RVM_Q4_K, RVM_Q5_K, RVM_Q6_K: GGUF's super-blocks of 256 columns, packed, apart from padding, into as many bytes as in GGUF */
    RVM_Q5_K = 6,
    RVM_Q6_K = 7
} rvm_kind;

/* The form of the activations x: float for float kinds of W, 8 or 16 bits for quantised kinds. The error of a product
 * with normally distributed x, relative to the product's standard deviation, is 0.6% with 8 bits and 2e-5 with 16 bits;
 * for super-blocks the error is 0.7% and 2.7e-5. */
typedef enum {
    RVM_ACTS_8 = 8,
    RVM_ACTS_16 = 16,
    RVM_ACTS_FLOAT = 32,
    RVM_ACTS_SUPER_8 = 256 + 8, /* RVM_ACTS_SUPER_*: activations for super-blocks, with one scale per 256 columns instead of 32 */
    RVM_ACTS_SUPER_16 = 256 + 16
} rvm_acts_kind;

enum { RVM_TILE_ROWS = 16, RVM_ALIGNMENT = 64 };

/* The form in which a matrix is stored. To pack several matrices with equal cols and group below each other as one
 * matrix, call rvm_matrix_plan for each of them. Then make one spec: rows = the sum of their rows; affine = 1 if at
 * least one is affine; scale_kind = their scale_kind if all have the same, else RVM_F32. */
typedef struct {
    uint32_t kind;       /* rvm_kind */
    uint32_t scale_kind; /* scale_kind: RVM_F16, RVM_BF16 or RVM_F32, the type of the stored scales of quantised weights */
    uint32_t affine;     /* affine: 0: no biases are stored, because each is -8 * scale (4 bits) or -128 * scale (8 bits) */
    uint32_t group;      /* group: the number of columns that share a scale: 32, 64 or 128; 0 for float kinds; 256 for super-blocks */
    uint64_t rows, cols; /* cols: a multiple of group; for float kinds any number */
} rvm_matrix_spec;

typedef struct rvm_matrix rvm_matrix; /* rvm_matrix: the head of a packed matrix; the packed weights follow it */

/* Find the smallest form that stores these scales and biases [rows, cols / group] of type scale_kind without loss.
 * biases is NULL for symmetric weights. For float kinds and super-blocks, group, scales and biases are ignored. */
RVM_API int rvm_matrix_plan(rvm_kind kind, size_t rows, size_t cols, size_t group, const void *scales,
                            const void *biases, rvm_kind scale_kind, rvm_matrix_spec *spec);

/* Return the bytes of a packed matrix, a multiple of 64; 0 for an invalid spec. */
RVM_API size_t rvm_matrix_bytes(const rvm_matrix_spec *spec);

/* Pack rows [row_begin, row_end) of the matrix. weights, scales and biases point to the data of row row_begin:
 *   weights: Q4, Q8: uint32 [n, cols * bits / 32], lowest bits first      F16, BF16, F32: [n, cols]
 *            Q4_K, Q5_K, Q6_K: GGUF blocks [n, cols / 256] of 144, 176 or 210 bytes
 *   scales, biases: [n, cols / group] of type scale_kind; biases can be NULL if spec->affine is 0
 * row_begin is a multiple of 16; row_end is a multiple of 16 or the number of rows. Several threads can pack different
 * ranges of rows at the same time. The call with row_begin = 0 also writes the matrix's head. Before that call,
 * rvm_matrix_rows, _cols and _tiles return 0. */
RVM_API int rvm_matrix_pack(const rvm_matrix_spec *spec, const void *weights, const void *scales,
                            const void *biases, rvm_kind scale_kind, size_t row_begin, size_t row_end,
                            void *memory);

/* Return RVM_OK if the memory has a packed matrix whose size, by its head, fits into `bytes`. Call this function for a
   mapped file before you use the matrix. */
RVM_API int rvm_matrix_check(const void *memory, size_t bytes);

RVM_API rvm_kind rvm_matrix_kind(const rvm_matrix *w);
RVM_API size_t rvm_matrix_rows(const rvm_matrix *w);
RVM_API size_t rvm_matrix_cols(const rvm_matrix *w);
RVM_API size_t rvm_matrix_tiles(const rvm_matrix *w); /* ceil(rows / 16) */

/* Return the kind of activations by which this matrix is multiplied, with `bits` (8 or 16) bits for quantised weights.
   Return RVM_ACTS_FLOAT for float weights, and 0 if bits is neither 8 nor 16. */
RVM_API rvm_acts_kind rvm_matrix_acts(const rvm_matrix *w, int bits);

/* Look up an embedding: out[cols] = row `row` of W as floats; Q4 and Q8 are dequantised as MLX does. */
RVM_API int rvm_matrix_row(const rvm_matrix *w, size_t row, float *out);

/* Return the bytes for the activations of `tokens` tokens; 0 for invalid sizes. */
RVM_API size_t rvm_acts_bytes(rvm_acts_kind kind, size_t tokens, size_t cols);

typedef struct {
    const char *name; /* name: for example "scalar", "avx2" or "avxvnni" */

    /* Convert the rows of x of the tokens [token_begin, token_end) to activations of this kind, and store them in acts.
       All tokens share acts, so several threads can each write some tokens. x: [tokens, x_stride], of which each row's
       first cols numbers are read. Only matmul of the same implementation can read acts. */
    int (*acts)(rvm_acts_kind kind, const float *x, size_t x_stride, size_t tokens, size_t cols,
                size_t token_begin, size_t token_end, void *acts);

    /* y[t][n] = sum_k x[t][k] * W[n][k] for rows n of the tiles [tile_begin, tile_end); several threads can each
       compute some tiles. kind: the kind of acts. y: [tokens, y_stride]; rows that only pad the last tile are not
       written. */
    int (*matmul)(const rvm_matrix *w, rvm_acts_kind kind, const void *acts, size_t tokens, size_t tile_begin,
                  size_t tile_end, float *y, size_t y_stride);

    /* These three functions compute attention over one head-page of codes, in integers (rvm_pages.h; tier: rvm_tier).
     * Each row of queries q, and of softmax weights p, becomes integers of at most 127 (one term) or of at most 15 bits
     * (two terms), with one scale. All implementations give the same bits. A NaN or an infinity in a row of q or p
     * makes the row's whole result NaN.
     *   page_queries  q [rows][head_dim], rotated if the tier's keys are rotated -> codes [rvm_page_codes_bytes]
     *   page_scores   scores[r][t] = q_r . k_t                    [rows][RVM_PAGE_TOKENS], all 64 tokens
     *   page_values   sum[r][d] += sum_t p[r][t] v_t[d]           p as scores; p >= 0
     * sum: each row has `stride` floats: head_dim rounded up to a multiple of 16, then 16 floats. The caller adds the
     * sum of the row's last 16 floats to every dimension of the row. soon: the head-page that the caller reads next,
     * for a prefetch, or NULL. */
    int (*page_queries)(int tier, const float *q, size_t rows, size_t head_dim, void *codes);
    int (*page_scores)(int tier, const uint8_t *page, const void *codes, size_t rows, size_t head_dim,
                       const uint8_t *soon, float *scores);
    int (*page_values)(int tier, const uint8_t *page, const float *p, size_t rows, size_t head_dim,
                       const uint8_t *soon, float *sum, size_t stride);

    /* Run the inner loop of matmul `rounds` times over one block in the L1 cache, to measure the peak rate for 4-bit
     * weights on this machine. Return the number of multiplications that the rounds computed. */
    uint64_t (*peak)(uint64_t rounds, int32_t *sum);
} rvm_matmul;

/* Return the bytes of page_queries' result, which only the same implementation can read; 0 for invalid sizes. */
RVM_API size_t rvm_page_codes_bytes(int tier, size_t rows, size_t head_dim);

/* rvm_matmul_impl and rvm_matmul_impl_name work like rvm_impl and rvm_impl_name; rvm_matmul has more implementations
   than rvm_kernels. */
RVM_API const rvm_matmul *rvm_matmul_impl(const char *name);
RVM_API const char *rvm_matmul_impl_name(size_t index);

/* Return the name of the rvm_kernels whose layers run together with this rvm_matmul; for example, "avx2" runs with
   "avxvnni". Return NULL for an unknown implementation. */
RVM_API const char *rvm_matmul_layers(const rvm_matmul *matmul);

#endif
