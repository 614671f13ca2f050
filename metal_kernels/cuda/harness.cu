// The kernels as CUDA C++, checked against plain loops on the host, then timed. No MLX needed.
//
//   nvcc -arch=sm_90 -O3 -o /tmp/h metal_kernels/cuda/harness.cu && /tmp/h            # checks, then times
//   /tmp/h check        /tmp/h time [tokens] [n_kv_heads] [group: 1, 4 or 8]
//
// Times are of a CUDA graph that runs the kernel for 8 layers, each with a cache of its own (more than
// the L2 holds), from CUDA events; GB/s count the bytes of the pages read, and the fraction is of what
// cudaMemcpyDeviceToDevice moves (read + written) on the same device.
#include "../dialect_cuda.h"
#include "../pages.h"
#include "../attend.h"
#include "../attend_matrix.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
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

template <int D, int G>
__global__ void __launch_bounds__(128)
attend_decode(const float *q, const float *q_cold, const int *params, const int *pages, const uchar *cold,
              const uchar *warm, const uchar *hot, float *o, float *ml) {
#include "../attend_decode.metal"
}

// BLOCKS: at least so many on a multiprocessor, which limits the registers of a thread.
template <int D, int G, int BLOCKS>
__global__ void __launch_bounds__(128, BLOCKS)
attend_decode_matrix(const float *q, const float *q_cold, const int *params, const int *pages, const uchar *cold,
                     const uchar *warm, const uchar *hot, float *o, float *ml) {
#include "../attend_decode_matrix.metal"
}

template <int D>
__global__ void __launch_bounds__(256) attend_merge(const float *o, const float *ml, const int *params, float *out) {
#include "../attend_merge.metal"
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
    explicit Device(size_t n_) : n(n_) { CHECK(cudaMalloc(&p, std::max<size_t>(n, 64) * sizeof(T))); }
    explicit Device(const std::vector<T> &v) : Device(v.size()) {
        CHECK(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> get() const {
        std::vector<T> v(n);
        CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

// A page of random content, straight in its bytes.
static void fill_page(uchar *page, int tier, int D) {
    ushort *half = (ushort *)page;
    if (tier == HOT) {
        for (int i = 0; i < 128 * D; i++) half[i] = f16(normal());
        return;
    }
    for (int i = 0; i < (tier == WARM ? 128 : 64) * D; i++) {
        int byte = rng() & 255;
        page[i] = tier == WARM && byte == 128 ? 127 : byte; // -128 does not occur
    }
    if (tier == WARM) {
        for (int t = 0; t < 128; t++) half[64 * D + t] = f16(uniform(0.005f, 0.03f));
    } else {
        for (int d = 0; d < D; d++) half[32 * D + d] = f16(uniform(0.05f, 0.3f)), half[33 * D + d] = f16(uniform(-3, 1));
        for (int t = 0; t < 64; t++) half[34 * D + t] = f16(uniform(0.05f, 0.3f)), half[34 * D + 64 + t] = f16(uniform(-2, 0));
    }
}

static double number(const uchar *page, int tier, int D, bool value, int t, int d) {
    const uchar *block = page + (value ? v_at(tier, D) : 0);
    auto half = [&](int byte) { return (double)f32(*(const ushort *)(page + byte)); };
    if (tier == HOT) return f32(((const ushort *)block)[t * D + d]);
    if (tier == WARM) return half((value ? v_scale_at(WARM, D) : k_scale_at(WARM, D)) + 2 * t) * (signed char)block[t * D + d];
    int n = block[(t * D + d) / 2] >> (d % 2 * 4) & 15;
    if (value) return half(v_scale_at(COLD, D) + 2 * t) * n + half(v_bias_at(D) + 2 * t);
    return half(k_scale_at(COLD, D) + 2 * d) * n + half(k_bias_at(D) + 2 * d);
}

struct Sequence {
    int n_cold, n_warm, hot_tokens, first;
    int tokens() const { return (n_cold + n_warm) * 64 + hot_tokens; }
    int n_hot() const { return (hot_tokens + 63) / 64; }
    int n_pages() const { return n_cold + n_warm + n_hot(); }
};

// One layer: pools, page table, queries.
struct Layer {
    int D, G, n_kv, splits;
    int matrix = 0; // 3 to 5: attend_decode_matrix with so many blocks on a multiprocessor, instead of attend_decode
    std::vector<Sequence> sequences;
    std::vector<int> params, pages;
    std::vector<uchar> pool[3];
    std::vector<float> q, q_cold;
    Device<uchar> d_pool[3];
    Device<int> d_params, d_pages;
    Device<float> d_q, d_q_cold, d_o, d_ml, d_out;

    // unique: every page has content of its own; otherwise 16 pages are repeated (quick to make, for timing)
    Layer(int D_, int G_, int n_kv_, std::vector<Sequence> s, int split, bool unique = true)
        : D(D_), G(G_), n_kv(n_kv_), splits(1), sequences(s) {
        int counts[3] = {0, 0, 0};
        for (auto &x : s) {
            counts[0] += x.n_cold, counts[1] += x.n_warm, counts[2] += x.n_hot();
            splits = std::max(splits, (x.n_pages() - x.first / 64 + split - 1) / split);
        }
        for (int tier = 0; tier < 3; tier++) {
            size_t bytes = page_bytes(tier, D), n = (size_t)counts[tier] * n_kv;
            pool[tier].resize(n * bytes);
            for (size_t i = 0; i < n; i++)
                if (unique || i < 16) fill_page(&pool[tier][i * bytes], tier, D);
                else memcpy(&pool[tier][i * bytes], &pool[tier][i % 16 * bytes], bytes);
            d_pool[tier] = Device<uchar>(pool[tier]);
        }
        std::vector<int> free[3];
        for (int tier = 0; tier < 3; tier++) {
            for (int i = 0; i < counts[tier]; i++) free[tier].push_back(i);
            std::shuffle(free[tier].begin(), free[tier].end(), rng);
        }
        float scale = 1.4426950408889634f / sqrtf(D);
        int scale_bits;
        memcpy(&scale_bits, &scale, 4);
        for (auto &x : s) {
            int row[PARAMS] = {x.n_cold, x.n_warm, x.n_hot(), x.tokens(), x.first, (int)pages.size(), split, n_kv, G, scale_bits, 0, 0, splits};
            params.insert(params.end(), row, row + PARAMS);
            int n[3] = {x.n_cold, x.n_warm, x.n_hot()};
            for (int tier = 0; tier < 3; tier++)
                for (int i = 0; i < n[tier]; i++) pages.push_back(free[tier].back()), free[tier].pop_back();
        }
        size_t rows = s.size() * n_kv * G;
        for (size_t i = 0; i < rows * D; i++) q.push_back(normal()), q_cold.push_back(normal());
        d_params = Device<int>(params), d_pages = Device<int>(pages);
        d_q = Device<float>(q), d_q_cold = Device<float>(q_cold);
        d_o = Device<float>(rows * splits * D), d_ml = Device<float>(rows * splits * 2), d_out = Device<float>(rows * D);
    }

    void attend(cudaStream_t stream = 0);
    void merge(cudaStream_t stream = 0);

    double bytes_read() const {
        double n = 0;
        for (auto &s : sequences)
            n += (double)s.n_cold * page_bytes(COLD, D) + (double)s.n_warm * page_bytes(WARM, D) + 4.0 * D * s.hot_tokens;
        return n * n_kv;
    }
};

template <int D, int G> static void launch_attend(Layer &a, cudaStream_t stream) {
    dim3 grid(a.splits, a.n_kv, a.sequences.size());
    auto kernel = attend_decode<D, G>;
    if constexpr (D != 80)
        if (a.matrix) kernel = a.matrix == 3 ? attend_decode_matrix<D, G, 3> : a.matrix == 4 ? attend_decode_matrix<D, G, 4> : attend_decode_matrix<D, G, 5>;
    kernel<<<grid, 128, 0, stream>>>(a.d_q.p, a.d_q_cold.p, a.d_params.p, a.d_pages.p, a.d_pool[0].p, a.d_pool[1].p,
                                     a.d_pool[2].p, a.d_o.p, a.d_ml.p);
}

template <int D> static void launch_group(Layer &a, cudaStream_t stream) {
    if (a.G == 1) launch_attend<D, 1>(a, stream);
    else if (a.G == 3) launch_attend<D, 3>(a, stream);
    else if (a.G == 4) launch_attend<D, 4>(a, stream);
    else launch_attend<D, 8>(a, stream);
}

void Layer::attend(cudaStream_t stream) {
    if (D == 64) launch_group<64>(*this, stream);
    else if (D == 80) launch_group<80>(*this, stream);
    else launch_group<128>(*this, stream);
    CHECK(cudaGetLastError());
}

void Layer::merge(cudaStream_t stream) {
    int rows = sequences.size() * n_kv * G;
    if (D == 64) attend_merge<64><<<rows, 256, 0, stream>>>(d_o.p, d_ml.p, d_params.p, d_out.p);
    else if (D == 80) attend_merge<80><<<rows, 256, 0, stream>>>(d_o.p, d_ml.p, d_params.p, d_out.p);
    else attend_merge<128><<<rows, 256, 0, stream>>>(d_o.p, d_ml.p, d_params.p, d_out.p);
    CHECK(cudaGetLastError());
}

// ---- checks ----

static int failures = 0;
static void report(const std::string &what, double error, double limit) {
    bool good = error <= limit;
    failures += !good;
    printf("%s  %-52s error %.2e (limit %.0e)\n", good ? "ok  " : "FAIL", what.c_str(), error, limit);
}

static double decode_error(Layer &a) {
    a.attend(), a.merge();
    CHECK(cudaDeviceSynchronize());
    std::vector<float> got = a.d_out.get();
    double worst = 0;
    for (size_t i = 0; i < a.sequences.size(); i++) {
        const Sequence &s = a.sequences[i];
        const int *ids = &a.pages[a.params[i * PARAMS + TABLE]];
        for (int h = 0; h < a.n_kv * a.G; h++) {
            size_t row = i * a.n_kv * a.G + h;
            std::vector<double> x, out(a.D, 0.0);
            auto page_of = [&](int t, int &tier) {
                int p = t / 64;
                tier = p < s.n_cold ? COLD : p < s.n_cold + s.n_warm ? WARM : HOT;
                return &a.pool[tier][((size_t)ids[p] * a.n_kv + h / a.G) * page_bytes(tier, a.D)];
            };
            double top = -INFINITY, sum = 0;
            for (int t = s.first; t < s.tokens(); t++) {
                int tier;
                const uchar *page = page_of(t, tier);
                const float *query = (tier == COLD ? &a.q_cold[0] : &a.q[0]) + row * a.D;
                double dot = 0;
                for (int d = 0; d < a.D; d++) dot += query[d] * number(page, tier, a.D, false, t % 64, d);
                x.push_back(dot / sqrt((double)a.D)), top = std::max(top, x.back());
            }
            for (int t = s.first; t < s.tokens(); t++) {
                int tier;
                const uchar *page = page_of(t, tier);
                double p = exp(x[t - s.first] - top);
                sum += p;
                for (int d = 0; d < a.D; d++) out[d] += p * number(page, tier, a.D, true, t % 64, d);
            }
            for (int d = 0; d < a.D; d++) {
                double want = sum > 0 ? out[d] / sum : 0, is = got[row * a.D + d];
                worst = std::isfinite(is) ? std::max(worst, fabs(is - want)) : INFINITY;
            }
        }
    }
    return worst;
}

static void check_decode() {
    for (int D : {64, 80, 128})
        for (int G : {1, 3, 4, 8})
            for (int split : {1, 3, 8}) {
                Layer a(D, G, 2, {{3, 2, 100, 0}, {0, 0, 1, 0}, {7, 1, 64, 200}, {0, 5, 3, 0}, {9, 0, 17, 0}}, split);
                std::string what = " D " + std::to_string(D) + " G " + std::to_string(G) + " split " + std::to_string(split);
                report("attend_decode" + what, decode_error(a), 5e-5);
                a.matrix = 4;
                if (D != 80) report("attend_decode_matrix" + what, decode_error(a), 2e-4);
            }
}

// ---- times ----

// Seconds for one run of `work`, which is captured once into a graph.
static double seconds(const std::function<void(cudaStream_t)> &work) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    work(stream);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 5; i++) CHECK(cudaGraphLaunch(exec, stream));
    std::vector<double> times;
    for (int r = 0; r < 15; r++) {
        const int n = 10;
        CHECK(cudaEventRecord(begin, stream));
        for (int i = 0; i < n; i++) CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        times.push_back(ms / n / 1000);
    }
    std::sort(times.begin(), times.end());
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    return times[times.size() / 2];
}

static double copy_bandwidth(size_t bytes) {
    Device<uchar> a(bytes), b(bytes);
    double s = seconds([&](cudaStream_t stream) { CHECK(cudaMemcpyAsync(b.p, a.p, bytes, cudaMemcpyDeviceToDevice, stream)); });
    CHECK(cudaFree(a.p));
    CHECK(cudaFree(b.p));
    return 2.0 * bytes / s;
}

static void free_layer(Layer &a) {
    for (auto &p : a.d_pool) cudaFree(p.p);
    for (void *p : {(void *)a.d_params.p, (void *)a.d_pages.p, (void *)a.d_q.p, (void *)a.d_q_cold.p, (void *)a.d_o.p, (void *)a.d_ml.p, (void *)a.d_out.p}) cudaFree(p);
}

static double time_decode(const char *name, int matrix, Sequence s, int n_kv, int G, int split, double copy) {
    const int LAYERS = 8;
    std::vector<Layer> layers;
    for (int i = 0; i < LAYERS; i++) layers.push_back(Layer(128, G, n_kv, {s}, split, false));
    for (auto &a : layers) a.matrix = matrix;
    double both = seconds([&](cudaStream_t stream) { for (auto &a : layers) a.attend(stream), a.merge(stream); }) / LAYERS;
    double alone = seconds([&](cudaStream_t stream) { for (auto &a : layers) a.attend(stream); }) / LAYERS;
    double bytes = layers[0].bytes_read();
    printf("%-16s split %2d: %4d x %d threadgroups  %7.2f MB  %7.2f us (attend alone %7.2f)  %6.0f GB/s = %4.1f%% of copy (alone %4.1f%%)\n",
           name, split, layers[0].splits, n_kv, bytes / 1e6, both * 1e6, alone * 1e6, bytes / both / 1e9, 100 * bytes / both / copy, 100 * bytes / alone / copy);
    for (auto &a : layers) free_layer(a);
    return both;
}

static void times(int tokens, int n_kv, int G) {
    double copy = copy_bandwidth((size_t)1 << 30);
    printf("copy: %.0f GB/s (read + written, 1 GiB); %.0f GB/s for 64 MiB\n", copy / 1e9, copy_bandwidth((size_t)1 << 26) / 1e9);
    int hot = std::min(tokens, 256 + tokens % 64), warm = std::max(0, std::min(tokens - hot, 1792)) / 64, cold = (tokens - hot) / 64 - warm;
    Sequence tiered = {cold, warm, tokens - 64 * (cold + warm), 0}, f16_only = {0, 0, tokens, 0};
    printf("%d tokens, %d KV heads, D 128, G %d: %d cold pages, %d warm, %d hot tokens\n", tokens, n_kv, G, cold, warm, tiered.hot_tokens);
    double best = 1, plain = 1;
    auto name = [](const char *tiers, int matrix) { return tiers + (matrix ? ", matrix " + std::to_string(matrix) : std::string()); };
    for (int matrix : {0, 3, 4, 5})
        for (int split : {2, 4, 8, 16, 32})
            best = std::min(best, time_decode(name("tiered", matrix).c_str(), matrix, tiered, n_kv, G, split, copy));
    for (int matrix : {0, 4})
        for (int split : {4, 8, 16})
            plain = std::min(plain, time_decode(name("f16", matrix).c_str(), matrix, f16_only, n_kv, G, split, copy));
    printf("a token's attention: tiered %.2f us, all f16 (same kernels) %.2f us: %.2fx\n", best * 1e6, plain * 1e6, plain / best);
}

int main(int argc, char **argv) {
    std::string what = argc > 1 ? argv[1] : "all";
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    printf("%s, %d multiprocessors, L2 %d MB\n", prop.name, prop.multiProcessorCount, prop.l2CacheSize >> 20);
    if (what != "time") check_decode();
    if (failures) return printf("%d checks failed\n", failures), 1;
    auto argument = [&](int i, int otherwise) { return argc > i ? atoi(argv[i]) : otherwise; };
    if (what != "check") times(argument(2, 32768), argument(3, 8), argument(4, 4));
    return 0;
}
