// These macros and functions define the words of the kernels' dialect (README.md) in CUDA C++, for nvcc and for mx.fast.cuda_kernel.
#ifndef RVM_DIALECT_CUDA
#define RVM_DIALECT_CUDA
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned long ulong;

#define FN __device__ __forceinline__
#define CONST_FN __host__ __device__ constexpr
#define CONSTANT constexpr
#define THREAD
#define GLOBAL_IN(T) const T *
#define GLOBAL_OUT(T) T *
#define LOCAL(T) T *
#define SHARED(T, name, n) __shared__ alignas(16) T name[n]
#define BARRIER() __syncthreads()
#define SIMD_BARRIER() __syncwarp()
#define UNROLL _Pragma("unroll")
#define KERNEL_START                  \
    const uint3 group_at = blockIdx;  \
    const uint thread_at = threadIdx.x; \
    const uint lane = thread_at % 32, simd_at = thread_at / 32; \
    (void)lane, (void)simd_at;

FN float shuffle_xor(float x, uint mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
FN float shuffle(float x, uint from) { return __shfl_sync(0xffffffffu, x, from); }

FN float product(float x, float y) { return __fmul_rn(x, y); }
FN float as_f32(uint bits) { return __uint_as_float(bits); }
FN uint as_u32(float x) { return __float_as_uint(x); }
FN float half_to_f32(uint bits) { return __half2float(__ushort_as_half((ushort)bits)); }
FN uint f32_to_half(float x) { return __half_as_ushort(__float2half_rn(x)); }

// These functions compute with two halves in a word, and with matrix units. Only the kernel bodies *_matrix.metal use
// these functions, because some GPUs have no matrix units.
FN uint pack_halves(float low, float high) {
    const __half2 h = __floats2half2_rn(low, high);
    return *(const uint *)&h;
}
FN uint half2_sub(uint a, uint b) {
    const __half2 h = __hsub2(*(const __half2 *)&a, *(const __half2 *)&b);
    return *(const uint *)&h;
}
FN float fast_exp2(float x) { // ex2.approx computes 2^x; a result that is denormal becomes 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FN uint half2_fma(uint a, uint b, uint c) {
    const __half2 h = __hfma2(*(const __half2 *)&a, *(const __half2 *)&b, *(const __half2 *)&c);
    return *(const uint *)&h;
}
FN uint byte_permute(uint a, uint b, uint select) { return __byte_perm(a, b, select); }
FN void multiply(float *c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
FN uint4 load_local_u32x4(const uint *p, uint at) { return *(const uint4 *)(p + at); }
FN uint4 load_local_halves(const ushort *p, uint at) { return *(const uint4 *)(p + at); } // loads eight halves

FN uint load_u32(const uchar *p, uint at) { return __ldg((const uint *)(p + at)); }
FN uint2 load_u32x2(const uchar *p, uint at) { return __ldg((const uint2 *)(p + at)); }
FN uint4 load_u32x4(const uchar *p, uint at) { return __ldg((const uint4 *)(p + at)); }
FN uint load_u16(const uchar *p, uint at) { return __ldg((const ushort *)(p + at)); }
FN void store_u16(uchar *p, uint at, uint x) { *(ushort *)(p + at) = (ushort)x; }
FN void store_u32(uchar *p, uint at, uint x) { *(uint *)(p + at) = x; }
FN void store_u32x4(uchar *p, uint at, uint4 x) { *(uint4 *)(p + at) = x; }

#endif
