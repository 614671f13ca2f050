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
#include "../quantise.h"
#include "../tile.h"

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
    cudaTriggerProgrammaticLaunchCompletion(); // the merge may take its place already; it waits there
#include "../attend_decode.metal"
}

// BLOCKS: at least so many on a multiprocessor, which limits the registers of a thread.
template <int D, int G, int BLOCKS>
__global__ void __launch_bounds__(128, BLOCKS)
attend_decode_matrix(const float *q, const float *q_cold, const int *params, const int *pages, const uchar *cold,
                     const uchar *warm, const uchar *hot, float *o, float *ml) {
    cudaTriggerProgrammaticLaunchCompletion();
#include "../attend_decode_matrix.metal"
}

template <int D>
__global__ void __launch_bounds__(256) attend_merge(const float *o, const float *ml, const int *params, float *out) {
    cudaGridDependencySynchronize();
#include "../attend_merge.metal"
}

template <int D>
__global__ void __launch_bounds__(128)
attend_prefill(const float *q, const float *q_cold, const int *params, const int *pages, const uchar *cold,
               const uchar *warm, const uchar *hot, const uchar *fresh, float *o) {
#include "../attend_prefill.metal"
}

template <int D> __global__ void demote_warm(const uchar *hot, const int *ids, const int *params, uchar *out) {
#include "../demote_warm.metal"
}

template <int D, int SOURCE>
__global__ void demote_cold(const uchar *pool, const int *ids, const int *params, uchar *out) {
#include "../demote_cold.metal"
}

template <int D, int TRADITIONAL>
__global__ void append(const float *k, const float *v, const float *turn, const int *params, uchar *out) {
#include "../append.metal"
}

template <int R1, int R2>
__global__ void lora_project(const float *x, const float *a1, const float *a2, const int *params, float *u) {
#include "../lora_project.metal"
}

template <int R1, int R2>
__global__ void lora_add(const float *y, const float *u, const float *b1, const float *b2, const int *params, float *out) {
#include "../lora_add.metal"
}

__global__ void micro_update(const float *w, const float *velocity, const float *g, const int *params, float *w_new,
                             float *velocity_new, int *bad) {
#include "../micro_update.metal"
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
        ushort *k = (ushort *)(page + k_scale_at(COLD, D)), *v = (ushort *)(page + v_scale_at(COLD, D));
        for (int t = 0; t < 64; t++) k[t] = f16(uniform(0.05f, 0.3f)), k[64 + t] = f16(uniform(-3, 1));
        for (int t = 0; t < 64; t++) v[t] = f16(uniform(0.05f, 0.3f)), v[64 + t] = f16(uniform(-2, 0));
    }
}

static double number(const uchar *page, int tier, int D, bool value, int t, int d) {
    const uchar *block = page + (value ? v_at(tier, D) : 0);
    auto half = [&](int byte) { return (double)f32(*(const ushort *)(page + byte)); };
    if (tier == HOT) return f32(((const ushort *)block)[t * D + d]);
    if (tier == WARM) return half((value ? v_scale_at(WARM, D) : k_scale_at(WARM, D)) + 2 * t) * (signed char)block[t * D + d];
    int n = block[(t * D + d) / 2] >> (d % 2 * 4) & 15;
    return half((value ? v_scale_at(COLD, D) : k_scale_at(COLD, D)) + 2 * t) * n + half((value ? v_bias_at(D) : k_bias_at(D)) + 2 * t);
}

struct Sequence {
    int n_cold, n_warm, hot_tokens, first;
    int tokens() const { return (n_cold + n_warm) * 64 + hot_tokens; }
    int n_hot() const { return (hot_tokens + 63) / 64; }
    int n_pages() const { return n_cold + n_warm + n_hot(); }
    int cost(int page) const { // cost_before of pages.h
        return std::min(page, n_cold) + WARM_COST * std::min(std::max(page - n_cold, 0), n_warm) + HOT_COST * std::max(page - n_cold - n_warm, 0);
    }
};

// One layer: pools, page table, queries.
struct Layer {
    int D, G, n_kv, splits;
    bool overlap = true; // launch the merge while the attention runs
    int matrix = 0; // 2 or 3: attend_decode_matrix with so many blocks on a multiprocessor, instead of attend_decode
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
            splits = std::max(splits, (x.cost(x.n_pages()) - x.cost(x.first / 64) + split - 1) / split);
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
        if (a.matrix) kernel = a.matrix == 3 ? attend_decode_matrix<D, G, 3> : attend_decode_matrix<D, G, 2>;
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
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(sequences.size() * n_kv * G), config.blockDim = dim3(256), config.stream = stream;
    config.attrs = &early, config.numAttrs = overlap;
    auto kernel = D == 64 ? attend_merge<64> : D == 80 ? attend_merge<80> : attend_merge<128>;
    CHECK(cudaLaunchKernelEx(&config, kernel, (const float *)d_o.p, (const float *)d_ml.p, (const int *)d_params.p, d_out.p));
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
                a.matrix = 2;
                if (D != 80) report("attend_decode_matrix" + what, decode_error(a), 2e-4);
            }
}

static std::vector<float> normals(size_t n) {
    std::vector<float> v(n);
    for (float &x : v) x = normal();
    return v;
}

static int bits_of(float x) {
    int bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// Bytes that differ from what the formulas of README.md give.
static size_t wrong_bytes(const uchar *page, int source, int D, bool cold, const uchar *got) {
    std::vector<uchar> want(page_bytes(cold ? COLD : WARM, D));
    ushort *half = (ushort *)want.data();
    std::vector<float> x(2 * 64 * D);
    for (int value = 0; value < 2; value++)
        for (int t = 0; t < 64; t++)
            for (int d = 0; d < D; d++) x[(value * 64 + t) * D + d] = (float)number(page, source, D, value, t, d);
    auto stored = [](float v) { ushort h = f16(v); return (ushort)(h == 0x8000 ? 0 : h); };
    if (!cold) {
        for (int row = 0; row < 128; row++) {
            float top = 0;
            for (int d = 0; d < D; d++) top = fmaxf(top, fabsf(x[row * D + d]));
            ushort scale = f16(top / 127.0f);
            half[64 * D + row] = scale;
            for (int d = 0; d < D; d++) {
                float s = f32(scale), q = s == 0 ? 0 : fminf(fmaxf(rintf(x[row * D + d] / s), -127), 127);
                want[row * D + d] = (uchar)(signed char)q;
            }
        }
    } else {
        int block = D == 80 ? 16 : D;
        for (int h = 1; h < block; h *= 2)
            for (int t = 0; t < 64; t++)
                for (int d = 0; d < D; d++)
                    if (!(d & h)) {
                        float a = x[t * D + d], b = x[t * D + d + h];
                        x[t * D + d] = a + b, x[t * D + d + h] = a - b;
                    }
        for (int i = 0; i < 64 * D; i++) x[i] *= (float)(1 / sqrt((double)block));
        for (int row = 0; row < 128; row++) { // 64 of K, 64 of V
            ushort *affine = half + 32 * D + row / 64 * 128 + row % 64;
            float low = INFINITY, high = -INFINITY;
            for (int d = 0; d < D; d++) low = fminf(low, x[row * D + d]), high = fmaxf(high, x[row * D + d]);
            affine[0] = stored((high - low) / 15.0f), affine[64] = stored(low);
            float s = f32(affine[0]), b = f32(affine[64]);
            for (int d = 0; d < D; d++) {
                float q = s == 0 ? 0 : fminf(fmaxf(rintf((x[row * D + d] - b) / s), 0), 15);
                want[(row * D + d) / 2] |= (int)q << (d % 2 * 4);
            }
        }
    }
    size_t wrong = 0;
    for (size_t i = 0; i < want.size(); i++) wrong += want[i] != got[i];
    return wrong;
}

template <int D> static void check_demotion() {
    const int N = 5, KV = 3;
    Layer a(D, 1, KV, {{0, 6, 0, 0}, {0, 0, 64 * 6, 0}}, 4);
    std::vector<int> ids = {4, 0, 5, 2, 1}, params(PARAMS);
    params[KV_HEADS] = KV;
    Device<int> d_ids(ids), d_params(params);
    for (int kind = 0; kind < 3; kind++) {
        int source = kind == 1 ? WARM : HOT;
        size_t from = page_bytes(source, D), to = page_bytes(kind ? COLD : WARM, D), wrong = 0;
        Device<uchar> out(N * KV * to);
        dim3 grid(N, KV);
        if (kind == 0) demote_warm<D><<<grid, 128>>>(a.d_pool[HOT].p, d_ids.p, d_params.p, out.p);
        if (kind == 1) demote_cold<D, WARM><<<grid, 128>>>(a.d_pool[WARM].p, d_ids.p, d_params.p, out.p);
        if (kind == 2) demote_cold<D, HOT><<<grid, 128>>>(a.d_pool[HOT].p, d_ids.p, d_params.p, out.p);
        CHECK(cudaDeviceSynchronize());
        std::vector<uchar> got = out.get();
        for (int i = 0; i < N; i++)
            for (int kv = 0; kv < KV; kv++)
                wrong += wrong_bytes(&a.pool[source][(ids[i] * KV + kv) * from], source, D, kind > 0, &got[(i * KV + kv) * to]);
        const char *names[] = {"hot -> warm", "warm -> cold", "hot -> cold"};
        report(std::string("demotion ") + names[kind] + ", D " + std::to_string(D) + ": wrong bytes", wrong, 0);
    }
}

template <int D> static void check_append() {
    const int T = 5, KV = 3;
    std::vector<float> k = normals(T * KV * D), v = normals(T * KV * D), turn(T * D);
    for (int t = 0; t < T; t++)
        for (int i = 0; i < D / 2; i++) {
            double angle = (1000 + t) * pow(10000.0, -2.0 * i / D);
            turn[t * D + i] = cos(angle), turn[t * D + D / 2 + i] = sin(angle);
        }
    std::vector<int> params(PARAMS);
    params[KV_HEADS] = KV, params[N_NEW] = T;
    Device<float> d_k(k), d_v(v), d_turn(turn);
    Device<int> d_params(params);
    Device<uchar> out(KV * 2 * T * D * 2);
    for (int traditional : {0, 1}) {
        auto kernel = traditional ? append<D, 1> : append<D, 0>;
        kernel<<<dim3(T, KV), 64>>>(d_k.p, d_v.p, d_turn.p, d_params.p, out.p);
        CHECK(cudaDeviceSynchronize());
        std::vector<uchar> got = out.get();
        const ushort *half = (const ushort *)got.data();
        double worst = 0;
        for (int t = 0; t < T; t++)
            for (int h = 0; h < KV; h++)
                for (int i = 0; i < D / 2; i++) {
                    int a = traditional ? 2 * i : i, b = traditional ? 2 * i + 1 : i + D / 2, row = (t * KV + h) * D;
                    double c = turn[t * D + i], s = turn[t * D + D / 2 + i], x = k[row + a], y = k[row + b];
                    const ushort *kr = half + ((h * 2) * T + t) * D, *vr = half + ((h * 2 + 1) * T + t) * D;
                    worst = std::max<double>({worst, fabs(f32(kr[a]) - (x * c - y * s)), fabs(f32(kr[b]) - (y * c + x * s)),
                                      fabs((double)f32(vr[a]) - v[row + a]), fabs((double)f32(vr[b]) - v[row + b])});
                }
        report("append D " + std::to_string(D) + (traditional ? " traditional" : ""), worst, 2e-3);
    }
}

template <int R1, int R2> static void check_lora() {
    const int T = 3, N = 1000, M = 770;
    std::vector<float> x = normals(T * N), y = normals(T * M), a1 = normals(N * R1), b1 = normals(R1 * M), a2 = normals(N * R2), b2 = normals(R2 * M);
    std::vector<int> first(PARAMS), second(PARAMS);
    first[0] = N, first[1] = bits_of(0.7f), first[2] = bits_of(-1.3f), second[0] = M;
    Device<float> dx(x), dy(y), da1(a1), db1(b1), da2(a2), db2(b2), u(T * (R1 + R2)), out(T * M);
    Device<int> p1(first), p2(second);
    lora_project<R1, R2><<<T, 256>>>(dx.p, da1.p, da2.p, p1.p, u.p);
    lora_add<R1, R2><<<dim3((M + 255) / 256, T), 256>>>(dy.p, u.p, db1.p, db2.p, p2.p, out.p);
    CHECK(cudaDeviceSynchronize());
    std::vector<float> got = out.get();
    double worst = 0;
    for (int t = 0; t < T; t++)
        for (int j = 0; j < M; j++) {
            double want = y[t * M + j];
            for (int r = 0; r < R1 + R2; r++) {
                double dot = 0;
                for (int i = 0; i < N; i++) dot += (double)x[t * N + i] * (r < R1 ? a1[i * R1 + r] : a2[i * R2 + r - R1]);
                want += dot * (r < R1 ? 0.7 * b1[r * M + j] : -1.3 * b2[(r - R1) * M + j]);
            }
            worst = std::max(worst, fabs(got[t * M + j] - want));
        }
    report("lora ranks " + std::to_string(R1) + ", " + std::to_string(R2), worst, 2e-3);
}

static void check_micro() {
    const int N = 49152 * 2 + 3;
    std::vector<float> w = normals(N), v = normals(N), g = normals(N);
    g[7] = NAN, w[N - 1] = g[N - 1] = 3e38f;
    std::vector<int> params(PARAMS);
    params[0] = N, params[1] = bits_of(1.0f), params[2] = bits_of(0.9f);
    int blocks = (N + 1023) / 1024;
    Device<float> dw(w), dv(v), dg(g), w_new(N), v_new(N);
    Device<int> p(params), bad(blocks);
    micro_update<<<blocks, 256>>>(dw.p, dv.p, dg.p, p.p, w_new.p, v_new.p, bad.p);
    CHECK(cudaDeviceSynchronize());
    double worst = 0, count = 0;
    std::vector<float> got = w_new.get();
    for (int b : bad.get()) count += b;
    for (int i = 0; i < N; i++)
        if (i != 7 && i != N - 1) worst = std::max(worst, fabs(got[i] - (w[i] + 0.9 * v[i] + 1.0 * g[i])));
    report("micro_update", worst, 2e-6);
    report("micro_update: 2 weights that are not finite", fabs(count - 2), 0);
}

template <int D> static void check_prefill() {
    const int T = 37, KV = 2, G = 3;
    for (int window : {0, 100}) {
        Layer a(D, G, KV, {{2, 1, 100, 0}}, 4);
        const Sequence &s = a.sequences[0];
        std::vector<int> params = a.params;
        params[N_NEW] = T, params[WINDOW] = window;
        std::vector<float> q = normals(T * KV * G * D), q_cold = normals(q.size());
        std::vector<uchar> fresh(KV * 2 * T * D * 2);
        for (size_t i = 0; i < fresh.size() / 2; i++) ((ushort *)fresh.data())[i] = f16(normal());
        Device<float> dq(q), dqc(q_cold), o(q.size());
        Device<int> dp(params);
        Device<uchar> df(fresh);
        attend_prefill<D><<<dim3((T * G + 31) / 32, KV), 128>>>(dq.p, dqc.p, dp.p, a.d_pages.p, a.d_pool[0].p, a.d_pool[1].p, a.d_pool[2].p, df.p, o.p);
        CHECK(cudaDeviceSynchronize());
        std::vector<float> got = o.get();
        double worst = 0;
        for (int t = 0; t < T; t++)
            for (int h = 0; h < KV * G; h++) {
                int kv = h / G, at = s.tokens() + t;
                std::vector<double> x, out(D, 0.0);
                double sum = 0, top = -INFINITY;
                auto value = [&](int token, bool v, int d, bool &cold) {
                    cold = token < 64 * s.n_cold;
                    if (token >= s.tokens()) return (double)f32(((ushort *)fresh.data())[((kv * 2 + v) * T + token - s.tokens()) * D + d]);
                    int p = token / 64, tier = p < s.n_cold ? COLD : p < s.n_cold + s.n_warm ? WARM : HOT;
                    return number(&a.pool[tier][((size_t)a.pages[p] * KV + kv) * page_bytes(tier, D)], tier, D, v, token % 64, d);
                };
                int from = window ? std::max(at - window + 1, 0) : 0;
                bool cold;
                for (int token = from; token <= at; token++) {
                    double dot = 0;
                    for (int d = 0; d < D; d++) {
                        double k = value(token, false, d, cold);
                        dot += k * (cold ? q_cold : q)[(t * KV * G + h) * D + d];
                    }
                    x.push_back(dot / sqrt((double)D)), top = std::max(top, x.back());
                }
                for (int token = from; token <= at; token++) {
                    double p = exp(x[token - from] - top);
                    sum += p;
                    for (int d = 0; d < D; d++) out[d] += p * value(token, true, d, cold);
                }
                for (int d = 0; d < D; d++) {
                    double is = got[(t * KV * G + h) * D + d];
                    worst = std::isfinite(is) ? std::max(worst, fabs(is - out[d] / sum)) : INFINITY;
                }
            }
        report("attend_prefill D " + std::to_string(D) + " window " + std::to_string(window), worst, 5e-5);
    }
}

template <int D> static void check_others() {
    check_demotion<D>();
    check_append<D>();
    check_prefill<D>();
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

// The least that any kernel needs: the bytes are read, 64 at a time in each thread, and hardly anything else happens.
__global__ void __launch_bounds__(256) only_read(const uint4 *p, size_t n, uint *out) {
    uint sum = 0;
    const size_t step = (size_t)gridDim.x * 256;
    for (size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < n; i += 4 * step) {
        uint4 w[4];
        for (int k = 0; k < 4; k++) w[k] = i + k * step < n ? __ldg(p + i + k * step) : make_uint4(0, 0, 0, 0);
        for (int k = 0; k < 4; k++) sum ^= w[k].x ^ w[k].y ^ w[k].z ^ w[k].w;
    }
    if (sum == 0x12345678) *out = sum;
}

static void time_reading(double bytes, int blocks, double copy) {
    const int LAYERS = 8;
    size_t n = (size_t)bytes / 16;
    Device<uchar> data(n * 16 * LAYERS);
    Device<uint> out(1);
    CHECK(cudaMemset(data.p, 1, data.n));
    double s = seconds([&](cudaStream_t stream) {
        for (int i = 0; i < LAYERS; i++) only_read<<<blocks, 256, 0, stream>>>((const uint4 *)data.p + i * n, n, out.p);
    }) / LAYERS;
    printf("only reading %.2f MB, %d x 256 threads: %.2f us, %.0f GB/s = %.1f%% of copy\n", bytes / 1e6, blocks, s * 1e6, bytes / s / 1e9, 100 * bytes / s / copy);
    cudaFree(data.p), cudaFree(out.p);
}

static void free_layer(Layer &a) {
    for (auto &p : a.d_pool) cudaFree(p.p);
    for (void *p : {(void *)a.d_params.p, (void *)a.d_pages.p, (void *)a.d_q.p, (void *)a.d_q_cold.p, (void *)a.d_o.p, (void *)a.d_ml.p, (void *)a.d_out.p}) cudaFree(p);
}

static double time_decode(const char *name, int matrix, bool overlap, Sequence s, int n_kv, int G, int split, double copy) {
    const int LAYERS = 8;
    std::vector<Layer> layers;
    for (int i = 0; i < LAYERS; i++) layers.push_back(Layer(128, G, n_kv, {s}, split, false));
    for (auto &a : layers) a.matrix = matrix, a.overlap = overlap;
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
    double bytes = n_kv * ((double)cold * page_bytes(COLD, 128) + (double)warm * page_bytes(WARM, 128) + 512.0 * tiered.hot_tokens);
    for (int blocks : {264, 528, 1056}) time_reading(bytes, blocks, copy);
    for (int matrix : {0, 2, 3})
        for (int split : {8, 12, 16, 20, 24, 32})
            best = std::min(best, time_decode(name("tiered", matrix).c_str(), matrix, true, tiered, n_kv, G, split, copy));
    puts("the merge launched after the attention:");
    for (int split : {12, 16, 20, 24}) time_decode("tiered, matrix 2", 2, false, tiered, n_kv, G, split, copy);
    puts("one tier alone, as many tokens:");
    for (int split : {16, 24, 32}) time_decode("cold, matrix 2", 2, true, {tokens / 64, 0, 0, 0}, n_kv, G, split, copy);
    for (int split : {48, 96}) time_decode("warm, matrix 2", 2, true, {0, tokens / 64, 0, 0}, n_kv, G, split, copy);
    for (int matrix : {0, 2, 3})
        for (int split : {24, 48, 96})
            plain = std::min(plain, time_decode(name("f16", matrix).c_str(), matrix, true, f16_only, n_kv, G, split, copy));
    printf("a token's attention: tiered %.2f us, all f16 (same kernels) %.2f us: %.2fx\n", best * 1e6, plain * 1e6, plain / best);
}

static void times_of_others() {
    const int D = 128, KV = 8, N = 64;
    Layer a(D, 4, KV, {{0, N, 0, 0}, {0, 0, 64 * N, 0}}, 4, false);
    std::vector<int> ids(N), params(PARAMS);
    for (int i = 0; i < N; i++) ids[i] = i;
    params[KV_HEADS] = KV;
    Device<int> d_ids(ids), d_params(params);
    Device<uchar> out(N * KV * page_bytes(WARM, D));
    double warm = seconds([&](cudaStream_t s) { demote_warm<D><<<dim3(N, KV), 128, 0, s>>>(a.d_pool[HOT].p, d_ids.p, d_params.p, out.p); });
    double cold = seconds([&](cudaStream_t s) { demote_cold<D, WARM><<<dim3(N, KV), 128, 0, s>>>(a.d_pool[WARM].p, d_ids.p, d_params.p, out.p); });
    printf("demotion of %d pages x %d heads, D 128: hot -> warm %.2f us, warm -> cold %.2f us\n", N, KV, warm * 1e6, cold * 1e6);

    const int T = 512;
    for (int tokens : {0, 4096, 32768}) {
        int warm_pages = std::min(tokens, 1792) / 64, hot = std::min(tokens, 256), cold_pages = tokens / 64 - (tokens ? warm_pages + hot / 64 : 0);
        Layer b(D, 4, KV, {{std::max(cold_pages, 0), tokens ? warm_pages : 0, hot, 0}}, 4, false);
        std::vector<int> row = b.params;
        row[N_NEW] = T;
        Device<float> q(normals(T * KV * 4 * D)), o(T * KV * 4 * D);
        Device<int> p(row);
        Device<uchar> fresh(KV * 2 * T * D * 2);
        CHECK(cudaMemset(fresh.p, 0, fresh.n));
        double s = seconds([&](cudaStream_t stream) {
            attend_prefill<D><<<dim3(T * 4 / 32, KV), 128, 0, stream>>>(q.p, q.p, p.p, b.d_pages.p, b.d_pool[0].p, b.d_pool[1].p, b.d_pool[2].p, fresh.p, o.p);
        });
        double flops = 4.0 * T * KV * 4 * D * (tokens + T / 2);
        printf("prefill of %d tokens after %5d, 32 heads: %9.1f us, %.1f TFLOP/s\n", T, tokens, s * 1e6, flops / s / 1e12);
        free_layer(b);
    }
}

int main(int argc, char **argv) {
    std::string what = argc > 1 ? argv[1] : "all";
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    printf("%s, %d multiprocessors, L2 %d MB\n", prop.name, prop.multiProcessorCount, prop.l2CacheSize >> 20);
    if (what != "time") {
        check_decode();
        check_others<64>(), check_others<80>(), check_others<128>();
        check_lora<1, 1>(), check_lora<8, 2>(), check_lora<16, 1>();
        check_micro();
    }
    if (failures) return printf("%d checks failed\n", failures), 1;
    auto argument = [&](int i, int otherwise) { return argc > i ? atoi(argv[i]) : otherwise; };
    if (what != "check") times_of_others();
    if (what != "check") times(argument(2, 32768), argument(3, 8), argument(4, 4));
    return 0;
}
