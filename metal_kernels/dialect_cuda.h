// The kernels' dialect in CUDA C++, for nvcc and for mx.fast.cuda_kernel.
#ifndef RVM_DIALECT_CUDA
#define RVM_DIALECT_CUDA
#include <cuda_fp16.h>

typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned long ulong;

#define FN __device__ __forceinline__
#define CONST_FN __host__ __device__ constexpr
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
    const uint lane = thread_at % 32, simd_at = thread_at / 32;

FN float shuffle_xor(float x, uint mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
FN float shuffle(float x, uint from) { return __shfl_sync(0xffffffffu, x, from); }

FN float as_f32(uint bits) { return __uint_as_float(bits); }
FN uint as_u32(float x) { return __float_as_uint(x); }
FN float half_to_f32(uint bits) { return __half2float(__ushort_as_half((ushort)bits)); }
FN uint f32_to_half(float x) { return __half_as_ushort(__float2half_rn(x)); }

FN uint load_u32(const uchar *p, uint at) { return __ldg((const uint *)(p + at)); }
FN uint2 load_u32x2(const uchar *p, uint at) { return __ldg((const uint2 *)(p + at)); }
FN uint4 load_u32x4(const uchar *p, uint at) { return __ldg((const uint4 *)(p + at)); }
FN uint load_u16(const uchar *p, uint at) { return __ldg((const ushort *)(p + at)); }
FN void store_u16(uchar *p, uint at, uint x) { *(ushort *)(p + at) = (ushort)x; }
#endif
