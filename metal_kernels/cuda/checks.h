// These functions compare the result of every kernel with plain loops on the host (the CPU). This header needs layer.h.
#pragma once
#include "layer.h"

static int failures = 0;
static void report(const std::string &what, double error, double limit) {
    bool good = error <= limit;
    failures += !good;
    printf("%s  %-52s error %.2e (limit %.0e)\n", good ? "ok  " : "FAIL", what.c_str(), error, limit);
}

// Set `worst` to the largest difference so far. The difference is infinite if the number `is` is not finite.
static void compare(double &worst, double is, double want) {
    worst = std::isfinite(is) ? std::max(worst, fabs(is - want)) : INFINITY;
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
                tier = s.tier(p);
                return p == s.n_pages() - 1 && tier == HOT ? a.opened(i, h / a.G) : a.page(tier, ids[p], h / a.G);
            };
            double top = -INFINITY, sum = 0;
            for (int t = s.first; t < s.tokens(); t++) {
                int tier;
                const uchar *page = page_of(t, tier);
                const float *query = (is_rotated(tier) ? &a.q_rotated[0] : &a.q[0]) + row * a.D;
                double dot = 0;
                for (int d = 0; d < a.D; d++) dot += query[d] * number(page, tier, a.D, false, t % 64, d);
                const double bias = a.slopes.empty() ? 0 : (double)a.slopes[h] * (t - (s.tokens() - 1));
                x.push_back(dot / sqrt((double)a.D) + bias), top = std::max(top, x.back());
            }
            for (int t = s.first; t < s.tokens(); t++) {
                int tier;
                const uchar *page = page_of(t, tier);
                double p = exp(x[t - s.first] - top);
                sum += p;
                for (int d = 0; d < a.D; d++) out[d] += p * number(page, tier, a.D, true, t % 64, d);
            }
            for (int d = 0; d < a.D; d++) compare(worst, got[row * a.D + d], sum > 0 ? out[d] / sum : 0);
        }
    }
    return worst;
}

// alibi: check the kernels with ALiBi's slopes
static void check_decode_of(int D, int G, int split, bool alibi) {
    Layer a(D, G, 2, {{{3, 2}, 100, 0}, {{}, 1, 0}, {{7, 1}, 64, 200}, {{0, 5}, 3, 0}, {{9}, 17, 0}, {{2, 1}, 0, 0}}, split);
    a.spoil_last_pages();
    if (alibi) a.add_slopes();
    std::string what = (alibi ? "_alibi D " : " D ") + std::to_string(D) + " G " + std::to_string(G) + " split " + std::to_string(split);
    report("attend_decode" + what, decode_error(a), 5e-5);
    a.matrix = 2;
    if (D == 64 || D == 128) report("attend_decode_matrix" + what, decode_error(a), 2e-4);
}

static void check_decode() {
    for (int D : {64, 80, 128, 256})
        for (int split : {1, 3, 8}) {
            // there is no kernel with D 256 and G 8: it would need more threadgroup memory than Metal has
            for (int G : {1, 3, 4, 8})
                if (D < 256 || G < 8) check_decode_of(D, G, split, false);
            for (int G : {3, 8})
                if (D < 256 || G < 8) check_decode_of(D, G, split, true);
        }
}

static std::vector<float> normals(size_t n) {
    std::vector<float> v(n);
    for (float &x : v) x = normal();
    return v;
}

// Return the name of the type T (float, __half or __nv_bfloat16), in which the model's graph computes.
template <typename T> static std::string type_name() {
    return std::is_same<T, float>::value ? "f32" : std::is_same<T, __half>::value ? "f16" : "bf16";
}
template <typename T> static std::vector<T> typed(const std::vector<float> &x) { return std::vector<T>(x.begin(), x.end()); }
template <typename T> static std::vector<float> rounded(std::vector<float> x) {
    for (float &value : x) value = (float)(T)value;
    return x;
}

// limit: the largest allowed error. The limit is half of the last bit of a number below 2, because attend_merge rounds
// once.
template <typename T> static void check_merge(double limit) {
    Layer a(128, 4, 2, {{{3, 2}, 100, 0}, {{}, 1, 0}}, 3);
    a.attend(), a.merge();
    Device<T> out(a.d_out.n);
    attend_merge<128, T><<<2 * 2 * 4, ATTEND_MERGE_THREADS>>>(a.d_o.p, a.d_ml.p, a.d_params.p, out.p);
    CHECK(cudaDeviceSynchronize());
    std::vector<float> want = a.d_out.get();
    std::vector<T> got = out.get();
    double worst = 0;
    for (size_t i = 0; i < want.size(); i++) {
        const double unit = std::max(1.0, fabs((double)want[i]));
        compare(worst, (float)got[i] / unit, want[i] / unit);
    }
    report("attend_merge to " + type_name<T>(), worst, limit);
}

// Multiply the D numbers of a token by the block-diagonal Hadamard matrix of README.md.
template <typename F> static void rotate(F *x, int D) {
    const int block = D == 80 ? 16 : std::min(D, 128);
    for (int h = 1; h < block; h *= 2)
        for (int d = 0; d < D; d++)
            if (!(d & h)) {
                F a = x[d], b = x[d + h];
                x[d] = a + b, x[d + h] = a - b;
            }
    for (int d = 0; d < D; d++) x[d] *= (F)(1 / sqrt((double)block));
}

// Return the number of bytes in `got` that differ from the result of the formulas in README.md.
static size_t wrong_bytes(const uchar *page, int source, int D, int to, const uchar *got) {
    std::vector<uchar> want(page_bytes(to, D));
    ushort *half = (ushort *)want.data();
    std::vector<float> x(2 * 64 * D);
    for (int value = 0; value < 2; value++)
        for (int t = 0; t < 64; t++)
            for (int d = 0; d < D; d++) x[(value * 64 + t) * D + d] = (float)number(page, source, D, value, t, d);
    auto stored = [](float v) { ushort h = f16(v); return (ushort)(h == 0x8000 ? 0 : h); };
    if (is_rotated(to) != is_rotated(source))
        for (int t = 0; t < 64; t++) rotate(&x[t * D], D);
    if (bits_of(to) == 8) {
        for (int row = 0; row < 128; row++) {
            float top = 0;
            for (int d = 0; d < D; d++) top = fmaxf(top, fabsf(x[row * D + d]));
            ushort scale = stored(top / 127.0f);
            half[64 * D + row] = scale;
            for (int d = 0; d < D; d++) {
                float s = f32(scale), q = s == 0 ? 0 : fminf(fmaxf(rintf(x[row * D + d] / s), -127), 127);
                want[row * D + d] = (uchar)(signed char)q;
            }
        }
    } else {
        for (int row = 0; row < 128; row++) { // the page has 64 rows of K, then 64 rows of V
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

// Return the demotion kernels: one kernel for each tier below hot.
template <int D, size_t... TO> static auto demotions(std::index_sequence<TO...>) {
    return std::array{demote<D, (int)TO>...};
}

template <int D> static void check_demotion() {
    const int N = 5, KV = 3;
    Layer a(D, 1, KV, {of_each_tier(6)}, 4);
    std::vector<int> ids = {4, 0, 5, 2, 1}, params(PARAMS);
    params[KV_HEADS] = KV;
    Device<int> d_ids(ids), d_params(params);
    for (int target = HOT - 1; target >= 0; target--) {
        size_t from = page_bytes(target + 1, D), to = page_bytes(target, D), wrong = 0;
        Device<uchar> out(N * KV * to);
        auto kernel = demotions<D>(std::make_index_sequence<HOT>())[target];
        kernel<<<dim3(N, KV), DEMOTE_THREADS>>>(a.d_pool[target + 1].p, d_ids.p, d_params.p, out.p);
        CHECK(cudaDeviceSynchronize());
        std::vector<uchar> got = out.get();
        for (int i = 0; i < N; i++)
            for (int kv = 0; kv < KV; kv++)
                wrong += wrong_bytes(&a.pool[target + 1][(ids[i] * KV + kv) * from], target + 1, D, target, &got[(i * KV + kv) * to]);
        report("demotion to tier " + std::to_string(target) + ", D " + std::to_string(D) + ": wrong bytes", wrong, 0);
    }
}

// Return the angles for RoPE as f32 [n][D]: for each of n positions, the cosines of D/2 angles, then their sines.
static std::vector<float> turns(int n, int D) {
    std::vector<float> turn(n * D);
    for (int t = 0; t < n; t++)
        for (int i = 0; i < D / 2; i++) {
            double angle = (1000 + t) * pow(10000.0, -2.0 * i / D);
            turn[t * D + i] = cos(angle), turn[t * D + D / 2 + i] = sin(angle);
        }
    return turn;
}

// Return the D numbers of a head after RoPE has turned them.
static std::vector<double> turned_head(const float *x, const float *turn, int D, bool traditional) {
    std::vector<double> out(D);
    for (int i = 0; i < D / 2; i++) {
        int a = traditional ? 2 * i : i, b = traditional ? 2 * i + 1 : i + D / 2;
        double c = turn[i], s = turn[D / 2 + i];
        out[a] = x[a] * c - x[b] * s, out[b] = x[b] * c + x[a] * s;
    }
    return out;
}

template <int D, typename T> static std::string typed_name(const char *kernel, bool traditional) {
    return kernel + (" D " + std::to_string(D)) + ", " + type_name<T>() + (traditional ? ", traditional" : "");
}

template <int D, typename T> static void check_append() {
    const int N = 5, KV = 3;
    std::vector<float> k = rounded<T>(normals(N * KV * D)), v = rounded<T>(normals(N * KV * D)), turn = turns(N, D);
    std::vector<int> params(PARAMS);
    params[KV_HEADS] = KV, params[N_NEW] = N;
    Device<T> d_k(typed<T>(k)), d_v(typed<T>(v));
    Device<float> d_turn(turn);
    Device<int> d_params(params);
    for (int traditional : {0, 1}) {
        Device<uchar> out(KV * 2 * N * D * 2);
        auto kernel = traditional ? append<D, 1, T> : append<D, 0, T>;
        kernel<<<dim3(N, KV), APPEND_THREADS>>>(d_k.p, d_v.p, d_turn.p, d_params.p, out.p);
        CHECK(cudaDeviceSynchronize());
        std::vector<uchar> got = out.get();
        const ushort *half = (const ushort *)got.data();
        double worst = 0;
        for (int t = 0; t < N; t++)
            for (int h = 0; h < KV; h++) {
                const int row = (t * KV + h) * D;
                std::vector<double> want = turned_head(&k[row], &turn[t * D], D, traditional);
                for (int d = 0; d < D; d++) {
                    compare(worst, f32(half[(h * 2 * N + t) * D + d]), want[d]);
                    compare(worst, f32(half[((h * 2 + 1) * N + t) * D + d]), v[row + d]);
                }
            }
        report(typed_name<D, T>("append", traditional), worst, 2e-3);
    }
}

// Check rope_append with one new token of each of three sequences. The new tokens are the first, the last and a middle row of an open page.
template <int D, typename T> static void check_rope_append() {
    const int B = 3, KV = 2, G = 3, H = KV * G, lengths[B] = {1, 128, 70};
    std::vector<float> q = rounded<T>(normals(B * H * D)), k = rounded<T>(normals(B * KV * D)), v = rounded<T>(normals(B * KV * D)), turn = turns(B, D);
    std::vector<uchar> old(B * KV * page_bytes(HOT, D));
    for (int i = 0; i < B * KV; i++) fill_page(&old[i * page_bytes(HOT, D)], HOT, D);
    std::vector<int> params(B * PARAMS);
    for (int b = 0; b < B; b++) params[b * PARAMS + KV_HEADS] = KV, params[b * PARAMS + GROUP] = G, params[b * PARAMS + N_TOKENS] = lengths[b];
    Device<T> d_q(typed<T>(q)), d_k(typed<T>(k)), d_v(typed<T>(v));
    Device<float> d_turn(turn);
    Device<uchar> d_old(old);
    Device<int> d_params(params);
    for (int traditional : {0, 1}) {
        Device<float> d_out(B * H * D), d_rotated(B * H * D);
        Device<uchar> d_new(old.size());
        auto kernel = traditional ? rope_append<D, 1, T> : rope_append<D, 0, T>;
        kernel<<<rope_append_grid(D, H, KV, B), ROPE_APPEND_THREADS>>>(d_q.p, d_k.p, d_v.p, d_turn.p, d_old.p, d_params.p, d_out.p, d_rotated.p, d_new.p);
        CHECK(cudaDeviceSynchronize());
        std::vector<float> out = d_out.get(), rotated = d_rotated.get();
        std::vector<uchar> bytes = d_new.get();
        const ushort *was = (const ushort *)old.data(), *is = (const ushort *)bytes.data();
        double query = 0, row = 0, others = 0;
        for (int i = 0; i < B * H; i++) {
            std::vector<double> want = turned_head(&q[i * D], &turn[i / H * D], D, traditional);
            for (int d = 0; d < D; d++) compare(query, out[i * D + d], want[d]);
            rotate(want.data(), D);
            for (int d = 0; d < D; d++) compare(query, rotated[i * D + d], want[d]);
        }
        for (int i = 0; i < B * KV * 128; i++) { // rows of the open pages: in each head 64 rows of K, then 64 rows of V
            const int head = i / 128, value = i / 64 % 2, b = head / KV;
            std::vector<double> want = turned_head(&k[head * D], &turn[b * D], D, traditional);
            const int t = i % 64, at = (lengths[b] - 1) % 64;
            for (int d = 0; d < D; d++)
                if (t == at) compare(row, f32(is[i * D + d]), value ? v[head * D + d] : want[d]);
                else others += is[i * D + d] != (t < at ? was[i * D + d] : 0); // the rows after the new row are zeros
        }
        report(typed_name<D, T>("rope_append", traditional) + ": queries", query, 1e-5);
        report(typed_name<D, T>("rope_append", traditional) + ": the new row", row, 2e-3);
        report(typed_name<D, T>("rope_append", traditional) + ": wrong numbers in other rows", others, 0);
    }
}

// Return the D numbers that gather must write for one token of a KV head, from a Layer with one sequence. The function rotates rotated keys back.
// value: true for the token's value, false for its key.
static std::vector<double> gathered(const Layer &a, const std::vector<uchar> &fresh, int n_new, int kv, bool value, int token) {
    const Sequence &s = a.sequences[0];
    std::vector<double> x(a.D);
    if (token >= s.tokens()) {
        const ushort *row = (const ushort *)fresh.data() + ((kv * 2 + value) * n_new + token - s.tokens()) * a.D;
        for (int d = 0; d < a.D; d++) x[d] = f32(row[d]);
        return x;
    }
    const int p = token / 64, tier = s.tier(p);
    for (int d = 0; d < a.D; d++) x[d] = number(a.page(tier, a.pages[p], kv), tier, a.D, value, token % 64, d);
    if (is_rotated(tier) && !value) rotate(x.data(), a.D);
    return x;
}

// Check gather with n_new tokens after the cache's tokens, from the page of token `first` on, for the KV heads head .. head + heads - 1 of three KV
// heads.
template <int D> static void check_gather(Sequence s, int n_new, int first, int head, int heads) {
    const int KV = 3, skipped = first / 64 * 64, total = s.tokens() - skipped + n_new;
    Layer a(D, 1, KV, {s}, 4);
    a.params[N_NEW] = n_new, a.params[FIRST] = first, a.params[HEAD] = head, a.params[HEADS] = heads;
    std::vector<uchar> fresh(KV * 2 * n_new * D * 2);
    for (size_t i = 0; i < fresh.size() / 2; i++) ((ushort *)fresh.data())[i] = f16(normal());
    Device<int> params(a.params);
    Device<uchar> d_fresh(fresh);
    Device<uint> out((size_t)heads * total * D); // K and V, with D / 2 words of 32 bits for each token
    const dim3 grid(s.n_pages() - skipped / 64 + (n_new + 63) / 64, heads);
    gather<D><<<grid, GATHER_THREADS>>>(params.p, a.d_pages.p, TIERS(POOL_GIVEN, a) d_fresh.p, out.p);
    CHECK(cudaDeviceSynchronize());
    std::vector<uint> got = out.get();
    double worst = 0;
    for (int value = 0; value < 2; value++)
        for (int h = 0; h < heads; h++)
            for (int t = 0; t < total; t++) {
                std::vector<double> want = gathered(a, fresh, n_new, head + h, value, skipped + t);
                const ushort *row = (const ushort *)got.data() + (size_t)((value * heads + h) * total + t) * D;
                // rounding to a 16-bit float changes a number by at most half of its last bit
                for (int d = 0; d < D; d++) {
                    const double unit = std::max(1.0, fabs(want[d]));
                    compare(worst, f32(row[d]) / unit, want[d] / unit);
                }
            }
    report("gather D " + std::to_string(D) + ", " + std::to_string(s.tokens()) + " + " + std::to_string(n_new) + " tokens from " +
           std::to_string(first) + ", heads " + std::to_string(head) + " .. " + std::to_string(head + heads - 1), worst, 5e-4);
}

template <int D, typename T> static void check_typed() {
    check_append<D, T>();
    check_rope_append<D, T>();
}

template <int D> static void check_others() {
    check_demotion<D>();
    check_typed<D, float>(), check_typed<D, __half>(), check_typed<D, __nv_bfloat16>();
    check_gather<D>({{2, 1}, 100, 0}, 37, 0, 0, 3);
    check_gather<D>({{2, 1}, 100, 0}, 70, 64, 1, 2); // `out` does not have the first cold page
    check_gather<D>({{2, 1}, 128, 0}, 1, 130, 2, 1); // `out` has no cold page and begins with the warm page
    check_gather<D>({{}, 3, 0}, 65, 0, 0, 3);
}
