// This program compiles the kernels as CUDA C++, checks them against plain loops on the host, and measures their times. The program needs no MLX.
//
//   nvcc -arch=sm_90 -O3 -o /tmp/h metal_kernels/cuda/harness.cu && /tmp/h            # checks, then times
//   /tmp/h check        /tmp/h time [tokens] [n_kv_heads] [group: 1, 4 or 8]
//
// layer.h has the kernels and a KV cache; checks.h has the checks; times.h measures the times.
// CUDA events measure the time of a CUDA graph that runs a decode kernel for 8 layers. Each layer has its own cache. With the default sizes, the
// caches together are larger than the L2 cache, so the kernel reads them from memory. GB/s count the bytes of the pages that are read. The fraction
// compares this rate with the rate of cudaMemcpyDeviceToDevice (bytes read + bytes written) on the same device.
#include "checks.h"
#include "layer.h"
#include "times.h"

int main(int argc, char **argv) {
    std::string what = argc > 1 ? argv[1] : "all";
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    printf("%s, %d multiprocessors, L2 %d MB\n", prop.name, prop.multiProcessorCount, prop.l2CacheSize >> 20);
    if (what != "time") {
        check_decode();
        check_merge<__half>(5e-4), check_merge<__nv_bfloat16>(4e-3);
        check_others<64>(), check_others<80>(), check_others<128>(), check_others<256>();
    }
    if (failures) return printf("%d checks failed\n", failures), 1;
    auto argument = [&](int i, int otherwise) { return argc > i ? atoi(argv[i]) : otherwise; };
    if (what == "check") return 0;
    double copy = copy_bandwidth((size_t)1 << 30);
    printf("copy: %.0f GB/s (read + written, 1 GiB); %.0f GB/s for 64 MiB\n", copy / 1e9, copy_bandwidth((size_t)1 << 26) / 1e9);
    times_of_others(copy);
    times(argument(2, 32768), argument(3, 8), argument(4, 4), copy);
    return 0;
}
