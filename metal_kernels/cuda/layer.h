// This header compiles the kernels as CUDA C++. The header also makes one layer of a KV cache with random content, which the checks and measurements
// use.
#pragma once
#include "../dialect_cuda.h"
#include "../pages.h"
#include "../attend.h"
#include "../attend_matrix.h"
#include "../quantise.h"
#include "../rope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#define CHECK(call)                                                                                 \
    do {                                                                                            \
        cudaError_t e_ = (call);                                                                    \
        if (e_ != cudaSuccess) {                                                                    \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_));           \
            exit(1);                                                                                \
        }                                                                                           \
    } while (0)

// ---- the kernels ----

#define POOL_DECLARED(x, name, pool, bits, rotated, cost) const uchar *pool,
#define POOL_GIVEN(layer, name, pool, bits, rotated, cost) (layer).d_pool[name].p,

template <int D, int G>
__global__ void __launch_bounds__(128)
attend_decode(const float *q, const float *q_rotated, const int *params, const int *pages,
              TIERS(POOL_DECLARED, 0) const uchar *open, float *o, float *ml) {
    // attend_merge can start on the GPU now, and waits for this kernel's results
    cudaTriggerProgrammaticLaunchCompletion();
#include "../attend_decode.metal"
}

// BLOCKS: the minimum number of thread blocks on a multiprocessor. This number limits the number of registers of a thread.
template <int D, int G, int BLOCKS>
__global__ void __launch_bounds__(128, BLOCKS)
attend_decode_matrix(const float *q, const float *q_rotated, const int *params, const int *pages,
                     TIERS(POOL_DECLARED, 0) const uchar *open, float *o, float *ml) {
    cudaTriggerProgrammaticLaunchCompletion();
#include "../attend_decode_matrix.metal"
}

// attend_decode_alibi and attend_decode_matrix_alibi have the bodies of the two kernels above with the word ALIBI.
#define ALIBI
template <int D, int G>
__global__ void __launch_bounds__(128)
attend_decode_alibi(const float *q, const float *q_rotated, const int *params, const int *pages,
                    TIERS(POOL_DECLARED, 0) const uchar *open, const float *slopes, float *o, float *ml) {
    cudaTriggerProgrammaticLaunchCompletion();
#include "../attend_decode.metal"
}

template <int D, int G>
__global__ void __launch_bounds__(128, 2)
attend_decode_matrix_alibi(const float *q, const float *q_rotated, const int *params, const int *pages,
                           TIERS(POOL_DECLARED, 0) const uchar *open, const float *slopes, float *o, float *ml) {
    cudaTriggerProgrammaticLaunchCompletion();
#include "../attend_decode_matrix.metal"
}
#undef ALIBI

template <int D, typename T>
__global__ void __launch_bounds__(256) attend_merge(const float *o, const float *ml, const int *params, T *out) {
    cudaGridDependencySynchronize();
#include "../attend_merge.metal"
}

template <int D>
__global__ void __launch_bounds__(128)
gather(const int *params, const int *pages, TIERS(POOL_DECLARED, 0) const uchar *fresh, uint *out) {
#include "../gather.metal"
}

template <int D, int TO> __global__ void demote(const uchar *pool, const int *ids, const int *params, uchar *out) {
#include "../demote.metal"
}

template <int D, int TRADITIONAL, typename T>
__global__ void append(const T *k, const T *v, const float *turn, const int *params, uchar *out) {
#include "../append.metal"
}

template <int D, int TRADITIONAL, typename T>
__global__ void rope_append(const T *q, const T *k, const T *v, const float *turn, const uchar *open, const int *params,
                            float *q_out, float *q_rotated, uchar *open_out) {
#include "../rope_append.metal"
}

// The threads of a threadgroup of each kernel. tests/metal/test_cuda.py compares these numbers with `threads` in the modules of
// ruvmlx/backends/mlx/kernels.
constexpr int ATTEND_DECODE_THREADS = 128, ATTEND_MERGE_THREADS = 256, GATHER_THREADS = 128;
constexpr int DEMOTE_THREADS = 128, APPEND_THREADS = 64, ROPE_APPEND_THREADS = 256;

// Return the threadgroups of rope_append: each simdgroup takes one block of a head's query, then each threadgroup takes one KV head.
static dim3 rope_append_grid(int D, int n_heads, int n_kv, int sequences) {
    const int simdgroups = ROPE_APPEND_THREADS / 32;
    return dim3((n_heads * blocks_of(D) + simdgroups - 1) / simdgroups + n_kv, sequences);
}

// ---- helpers ----

static std::mt19937 rng(7);
static float uniform(float a, float b) { return std::uniform_real_distribution<float>(a, b)(rng); }
static float normal() { return std::normal_distribution<float>()(rng); }
static unsigned short f16(float x) { return __half_as_ushort(__float2half_rn(x)); }
static float f32(unsigned short x) { return __half2float(__ushort_as_half(x)); }

template <typename T> struct Device {
    T *p = nullptr;
    size_t n = 0;
    Device() {}
    explicit Device(size_t n_) : n(n_) {
        CHECK(cudaMalloc(&p, std::max<size_t>(n, 64) * sizeof(T)));
        // fill the result with NaN, so that a number that a kernel forgets to write stays NaN
        CHECK(cudaMemset(p, 255, n * sizeof(T)));
    }
    explicit Device(const std::vector<T> &v) : Device(v.size()) {
        CHECK(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> get() const {
        std::vector<T> v(n);
        CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

// Fill the bytes of one page with random content for its tier.
static void fill_page(uchar *page, int tier, int D) {
    const int bits = bits_of(tier);
    ushort *half = (ushort *)page;
    if (bits == 16) {
        for (int i = 0; i < 128 * D; i++) half[i] = f16(normal());
        return;
    }
    for (int i = 0; i < 16 * bits * D; i++) {
        int byte = rng() & 255;
        page[i] = bits == 8 && byte == 128 ? 127 : byte; // the code -128 does not occur in a page
    }
    if (bits == 8) {
        for (int t = 0; t < 128; t++) half[64 * D + t] = f16(uniform(0.005f, 0.03f));
    } else {
        ushort *k = (ushort *)(page + k_scale_at(bits, D)), *v = (ushort *)(page + v_scale_at(bits, D));
        for (int t = 0; t < 64; t++) k[t] = f16(uniform(0.05f, 0.3f)), k[64 + t] = f16(uniform(-3, 1));
        for (int t = 0; t < 64; t++) v[t] = f16(uniform(0.05f, 0.3f)), v[64 + t] = f16(uniform(-2, 0));
    }
}

static double number(const uchar *page, int tier, int D, bool value, int t, int d) {
    const int bits = bits_of(tier);
    const uchar *block = page + (value ? v_at(bits, D) : 0);
    auto half = [&](int byte) { return (double)f32(*(const ushort *)(page + byte)); };
    if (bits == 16) return f32(((const ushort *)block)[t * D + d]);
    const double scale = half((value ? v_scale_at(bits, D) : k_scale_at(bits, D)) + 2 * t);
    if (bits == 8) return scale * (signed char)block[t * D + d];
    int n = block[(t * D + d) / 2] >> (d % 2 * 4) & 15;
    return scale * n + half((value ? v_bias_at(bits, D) : k_bias_at(bits, D)) + 2 * t);
}

struct Sequence {
    int lower[HOT], hot_tokens, first; // lower: the number of pages in each tier below hot, the oldest tier first
    int n_hot() const { return (hot_tokens + 63) / 64; }
    int count(int tier) const { return tier == HOT ? n_hot() : lower[tier]; }
    int n_lower() const { return std::accumulate(lower, lower + HOT, 0); }
    int n_pages() const { return n_lower() + n_hot(); }
    int tokens() const { return n_lower() * 64 + hot_tokens; }
    int tier(int page) const {
        int tier = 0;
        while (tier < HOT && page >= lower[tier]) page -= lower[tier++];
        return tier;
    }
    int cost(int page) const { // cost: the same sum as in the function cost_before of pages.h
        int sum = 0;
        for (int i = 0; i < page; i++) sum += cost_of(tier(i));
        return sum;
    }
};

// Return the number of bytes that attention over all tokens of the sequence reads for one KV head.
static double bytes_of(const Sequence &s, int D) {
    double n = 4.0 * D * s.hot_tokens;
    for (int tier = 0; tier < HOT; tier++) n += (double)s.lower[tier] * page_bytes(tier, D);
    return n;
}

// Return a sequence that has `pages` pages in each tier.
static Sequence of_each_tier(int pages) {
    Sequence s = {};
    std::fill(s.lower, s.lower + HOT, pages);
    s.hot_tokens = 64 * pages;
    return s;
}

// One layer of a KV cache: the pools of pages of all tiers, the page table and the queries.
struct Layer {
    int D, G, n_kv, splits;
    bool overlap = true; // overlap: true: launch attend_merge while the attention kernel still runs
    int matrix = 0; // matrix: 2 or 3: run attend_decode_matrix with this number of blocks on a multiprocessor; 0: run attend_decode
    std::vector<Sequence> sequences;
    std::vector<int> params, pages;
    std::vector<uchar> pool[N_TIERS], open; // open: a copy of the last hot page of each sequence
    std::vector<float> q, q_rotated, slopes; // slopes: ALiBi's slope of each query head; empty: the kernels run without slopes
    Device<uchar> d_pool[N_TIERS], d_open;
    Device<int> d_params, d_pages;
    Device<float> d_q, d_q_rotated, d_slopes, d_o, d_ml, d_out;

    // unique: true gives each page its own content; false repeats 16 pages, because this is quick and enough for measuring times
    Layer(int D_, int G_, int n_kv_, std::vector<Sequence> s, int split, bool unique = true)
        : D(D_), G(G_), n_kv(n_kv_), splits(1), sequences(s) {
        int counts[N_TIERS] = {};
        for (auto &x : s) {
            for (int tier = 0; tier < N_TIERS; tier++) counts[tier] += x.count(tier);
            splits = std::max(splits, (x.cost(x.n_pages()) - x.cost(x.first / 64) + split - 1) / split);
        }
        for (int tier = 0; tier < N_TIERS; tier++) {
            size_t bytes = page_bytes(tier, D), n = (size_t)counts[tier] * n_kv;
            pool[tier].resize(n * bytes);
            for (size_t i = 0; i < n; i++)
                if (unique || i < 16) fill_page(&pool[tier][i * bytes], tier, D);
                else memcpy(&pool[tier][i * bytes], &pool[tier][i % 16 * bytes], bytes);
        }
        std::vector<int> free[N_TIERS];
        for (int tier = 0; tier < N_TIERS; tier++) {
            for (int i = 0; i < counts[tier]; i++) free[tier].push_back(i);
            std::shuffle(free[tier].begin(), free[tier].end(), rng);
        }
        float scale = 1.4426950408889634f / sqrtf(D);
        int scale_bits;
        memcpy(&scale_bits, &scale, 4);
        for (auto &x : s) {
            int row[PARAMS] = {};
            for (int tier = 0; tier < N_TIERS; tier++) row[tier] = x.count(tier);
            row[N_TOKENS] = x.tokens(), row[FIRST] = x.first, row[TABLE] = (int)pages.size(), row[SPLIT] = split;
            row[KV_HEADS] = n_kv, row[GROUP] = G, row[SCALE] = scale_bits, row[SPLITS] = splits;
            params.insert(params.end(), row, row + PARAMS);
            for (int tier = 0; tier < N_TIERS; tier++)
                for (int i = 0; i < x.count(tier); i++) pages.push_back(free[tier].back()), free[tier].pop_back();
            open_page(x, pages.back());
        }
        for (int tier = 0; tier < N_TIERS; tier++) d_pool[tier] = Device<uchar>(pool[tier]);
        d_open = Device<uchar>(open);
        size_t rows = s.size() * n_kv * G;
        for (size_t i = 0; i < rows * D; i++) q.push_back(normal()), q_rotated.push_back(normal());
        d_params = Device<int>(params), d_pages = Device<int>(pages);
        d_q = Device<float>(q), d_q_rotated = Device<float>(q_rotated);
        d_o = Device<float>(rows * splits * D), d_ml = Device<float>(rows * splits * 2), d_out = Device<float>(rows * D);
    }

    // Give each query head a slope. The slopes differ, because a kernel that uses the slope of another head must fail the check.
    void add_slopes() {
        for (int h = 0; h < n_kv * G; h++) slopes.push_back(powf(2, -8.0f * (h + 1) / (n_kv * G)));
        d_slopes = Device<float>(slopes);
    }

    // Copy the last hot page of a sequence to `open`, and set the rows after the last token to NaN.
    void open_page(const Sequence &x, int id) {
        const size_t bytes = (size_t)n_kv * page_bytes(HOT, D), at = open.size();
        open.resize(at + bytes, 255);
        if (!x.n_hot()) return;
        uchar *page = &pool[HOT][id * bytes];
        for (int row = 0; row < n_kv * 128; row++) // in each head 64 rows of K, then 64 rows of V
            if (row % 64 >= x.hot_tokens - (x.n_hot() - 1) * 64) memset(page + (size_t)row * 2 * D, 255, 2 * D);
        memcpy(&open[at], page, bytes);
    }

    // Overwrite the last hot pages in the pool with NaN, because the decode kernels must read these pages only from `open`.
    void spoil_last_pages() {
        const size_t bytes = (size_t)n_kv * page_bytes(HOT, D);
        for (size_t i = 0; i < sequences.size(); i++)
            if (sequences[i].n_hot()) memset(&pool[HOT][pages[params[i * PARAMS + TABLE] + sequences[i].n_pages() - 1] * bytes], 255, bytes);
        CHECK(cudaMemcpy(d_pool[HOT].p, pool[HOT].data(), pool[HOT].size(), cudaMemcpyHostToDevice));
    }

    const uchar *page(int tier, int id, int kv) const { return &pool[tier][((size_t)id * n_kv + kv) * page_bytes(tier, D)]; }
    const uchar *opened(size_t sequence, int kv) const { return &open[(sequence * n_kv + kv) * page_bytes(HOT, D)]; }
    void attend(cudaStream_t stream = 0);
    void merge(cudaStream_t stream = 0);

    double bytes_read() const {
        double n = 0;
        for (auto &s : sequences) n += bytes_of(s, D);
        return n * n_kv;
    }
};

template <int D, int G> static void launch_attend(Layer &a, cudaStream_t stream) {
    dim3 grid(a.splits, a.n_kv, a.sequences.size());
    auto kernel = attend_decode<D, G>;
    if constexpr (D == 64 || D == 128)
        if (a.matrix) kernel = a.matrix == 3 ? attend_decode_matrix<D, G, 3> : attend_decode_matrix<D, G, 2>;
    kernel<<<grid, ATTEND_DECODE_THREADS, 0, stream>>>(a.d_q.p, a.d_q_rotated.p, a.d_params.p, a.d_pages.p, TIERS(POOL_GIVEN, a)
                                     a.d_open.p, a.d_o.p, a.d_ml.p);
}

template <int D, int G> static void launch_alibi(Layer &a, cudaStream_t stream) {
    dim3 grid(a.splits, a.n_kv, a.sequences.size());
    auto kernel = attend_decode_alibi<D, G>;
    if constexpr (D == 64 || D == 128)
        if (a.matrix) kernel = attend_decode_matrix_alibi<D, G>;
    kernel<<<grid, ATTEND_DECODE_THREADS, 0, stream>>>(a.d_q.p, a.d_q_rotated.p, a.d_params.p, a.d_pages.p, TIERS(POOL_GIVEN, a)
                                     a.d_open.p, a.d_slopes.p, a.d_o.p, a.d_ml.p);
}

// The program has the kernels with slopes only for groups of 3 and 8 heads, because nvcc takes seconds for each kernel.
template <int D> static void launch_alibi_group(Layer &a, cudaStream_t stream) {
    if (a.G == 3) launch_alibi<D, 3>(a, stream);
    else if constexpr (D < 256) launch_alibi<D, 8>(a, stream);
}

template <int D> static void launch_group(Layer &a, cudaStream_t stream) {
    if (!a.slopes.empty()) launch_alibi_group<D>(a, stream);
    else if (a.G == 1) launch_attend<D, 1>(a, stream);
    else if (a.G == 3) launch_attend<D, 3>(a, stream);
    else if (a.G == 4) launch_attend<D, 4>(a, stream);
    else if constexpr (D < 256) launch_attend<D, 8>(a, stream);
}

void Layer::attend(cudaStream_t stream) {
    if (D == 64) launch_group<64>(*this, stream);
    else if (D == 80) launch_group<80>(*this, stream);
    else if (D == 128) launch_group<128>(*this, stream);
    else launch_group<256>(*this, stream);
    CHECK(cudaGetLastError());
}

void Layer::merge(cudaStream_t stream) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(sequences.size() * n_kv * G), config.blockDim = dim3(ATTEND_MERGE_THREADS), config.stream = stream;
    config.attrs = &early, config.numAttrs = overlap;
    auto kernel = D == 64 ? attend_merge<64, float> : D == 80 ? attend_merge<80, float> : D == 128 ? attend_merge<128, float> : attend_merge<256, float>;
    CHECK(cudaLaunchKernelEx(&config, kernel, (const float *)d_o.p, (const float *)d_ml.p, (const int *)d_params.p, d_out.p));
}
