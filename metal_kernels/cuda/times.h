// These functions measure the times of the kernels, and compare their read rates with the device's copy bandwidth. This header needs checks.h.
#pragma once
#include "checks.h"

// Return the seconds that one run of `work` takes. The function captures `work` once into a CUDA graph.
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

// Only read the bytes, 64 bytes at a time in each thread. A kernel that reads these bytes can hardly be faster than
// this kernel.
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
    for (void *p : {(void *)a.d_params.p, (void *)a.d_pages.p, (void *)a.d_q.p, (void *)a.d_q_rotated.p, (void *)a.d_o.p, (void *)a.d_ml.p, (void *)a.d_out.p, (void *)a.d_open.p}) cudaFree(p);
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

#define TIER_NAME(x, NAME, name, ...) #name,
static const char *const TIER_NAMES[] = {TIERS(TIER_NAME, )};

// Return a sequence of `tokens` tokens: the newest 256 to 319 tokens in the hot tier, at most 1,792 tokens in each lower tier except the last, and all
// other tokens in the last tier.
static Sequence tiers_of(int tokens) {
    int left = std::max(0, tokens - 256 - tokens % 64) / 64;
    Sequence s = {{}, tokens - 64 * left, 0};
    for (int tier = HOT - 1; tier > 0; tier--) left -= s.lower[tier] = std::min(left, 28);
    s.lower[0] = left;
    return s;
}

static void times(int tokens, int n_kv, int G, double copy) {
    Sequence tiered = tiers_of(tokens), f16_only = {{}, tokens, 0};
    printf("%d tokens, %d KV heads, D 128, G %d:", tokens, n_kv, G);
    for (int tier = 0; tier < HOT; tier++) printf(" %d %s pages,", tiered.lower[tier], TIER_NAMES[tier]);
    printf(" %d hot tokens\n", tiered.hot_tokens);
    double best = 1, plain = 1;
    auto name = [](const char *tiers, int matrix) { return tiers + (matrix ? ", matrix " + std::to_string(matrix) : std::string()); };
    double bytes = n_kv * bytes_of(tiered, 128);
    for (int blocks : {264, 528, 1056}) time_reading(bytes, blocks, copy);
    for (int matrix : {0, 2, 3})
        for (int split : {8, 12, 16, 20, 24, 32})
            best = std::min(best, time_decode(name("tiered", matrix).c_str(), matrix, true, tiered, n_kv, G, split, copy));
    puts("the merge launched after the attention:");
    for (int split : {12, 16, 20, 24}) time_decode("tiered, matrix 2", 2, false, tiered, n_kv, G, split, copy);
    puts("one tier alone, as many tokens:");
    for (int tier = 0; tier < HOT; tier++) {
        Sequence one = {};
        one.lower[tier] = tokens / 64;
        for (int split : {16, 24, 32, 48, 96}) time_decode(name(TIER_NAMES[tier], 2).c_str(), 2, true, one, n_kv, G, split, copy);
    }
    for (int matrix : {0, 2, 3})
        for (int split : {24, 48, 96})
            plain = std::min(plain, time_decode(name("f16", matrix).c_str(), matrix, true, f16_only, n_kv, G, split, copy));
    printf("a token's attention: tiered %.2f us, all f16 (same kernels) %.2f us: %.2fx\n", best * 1e6, plain * 1e6, plain / best);
}

static void times_of_others(double copy) {
    const int D = 128, KV = 8, N = 64;
    Layer a(D, 4, KV, {of_each_tier(N)}, 4, false);
    std::vector<int> ids(N), params(PARAMS);
    for (int i = 0; i < N; i++) ids[i] = i;
    params[KV_HEADS] = KV;
    Device<int> d_ids(ids), d_params(params);
    for (int to = HOT - 1; to >= 0; to--) {
        Device<uchar> out(N * KV * page_bytes(to, D));
        auto demote_to = demotions<D>(std::make_index_sequence<HOT>())[to];
        double took = seconds([&](cudaStream_t s) { demote_to<<<dim3(N, KV), DEMOTE_THREADS, 0, s>>>(a.d_pool[to + 1].p, d_ids.p, d_params.p, out.p); });
        printf("demotion of %d pages x %d heads to %s, D 128: %.2f us\n", N, KV, TIER_NAMES[to], took * 1e6);
    }

    const int B = 1, H = 4 * KV;
    Device<__half> q(typed<__half>(normals(B * H * D))), k(typed<__half>(normals(B * KV * D)));
    Device<float> turn(turns(B, D)), q_out(B * H * D), q_rotated(B * H * D);
    Device<uchar> open_out(B * KV * page_bytes(HOT, D));
    double token = seconds([&](cudaStream_t s) {
        rope_append<D, 0, __half><<<rope_append_grid(D, H, KV, B), ROPE_APPEND_THREADS, 0, s>>>(q.p, k.p, k.p, turn.p, a.d_open.p, a.d_params.p, q_out.p,
                                                                                         q_rotated.p, open_out.p);
    });
    printf("rope_append of one token, %d + %d heads, D 128: %.2f us\n", H, KV, token * 1e6);

    const int n_new = 512, tokens = 32768;
    Sequence s = tiers_of(tokens);
    Layer b(D, 4, KV, {s}, 4, false);
    b.params[N_NEW] = n_new, b.params[HEADS] = KV;
    Device<int> p(b.params);
    Device<uchar> fresh(KV * 2 * n_new * D * 2);
    Device<uint> out_halves((size_t)KV * (tokens + n_new) * D);
    CHECK(cudaMemset(fresh.p, 0, fresh.n));
    double time = seconds([&](cudaStream_t stream) {
        gather<D><<<dim3(s.n_pages() + n_new / 64, KV), GATHER_THREADS, 0, stream>>>(p.p, b.d_pages.p, TIERS(POOL_GIVEN, b) fresh.p, out_halves.p);
    });
    double moved = b.bytes_read() + fresh.n + 4.0 * out_halves.n;
    printf("gather of %d + %d tokens, %d heads, D 128: %.2f us, %.0f GB/s (read + written) = %.1f%% of copy\n", tokens, n_new, KV, time * 1e6,
           moved / time / 1e9, 100 * moved / time / copy);
    free_layer(a), free_layer(b);
}
