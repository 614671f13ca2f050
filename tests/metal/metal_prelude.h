// What the kernels use of Metal's language and library, declared for clang: as C++ for OpenCL (front_end.py, whose address
// spaces are Metal's) and as C++14 (test_msl.py, which keeps MLX's template). Nothing here is ever run, so functions need no
// body. A name that is missing is refused: whoever uses a new one of Metal's looks it up and adds it.
#pragma once
#ifdef __OPENCL_CPP_VERSION__
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define inline inline __attribute__((used)) // so that helpers without a caller are looked at too
#define kernel __kernel // words that Metal reserves: no variable may be called so
#define vertex __kernel
#define fragment __kernel
#else
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
typedef _Float16 half;
#endif

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uchar, uint8_t;
typedef unsigned short ushort, uint16_t;
typedef unsigned int uint, uint32_t;
typedef unsigned long ulong, uint64_t;
typedef half float16_t, bfloat16_t; // C++ for OpenCL has no bfloat: a 16-bit float that converts as Metal's does

#define VECTORS(T)                                       \
    typedef T T##2 __attribute__((ext_vector_type(2))); \
    typedef T T##3 __attribute__((ext_vector_type(3))); \
    typedef T T##4 __attribute__((ext_vector_type(4)));
VECTORS(char) VECTORS(uchar) VECTORS(short) VECTORS(ushort) VECTORS(int) VECTORS(uint) VECTORS(half) VECTORS(float)

template <typename T, typename U> T as_type(U x) {
    static_assert(sizeof(T) == sizeof(U), "as_type between types of different sizes");
#ifdef __OPENCL_CPP_VERSION__
    return __builtin_astype(x, T);
#else
    return __builtin_bit_cast(T, x);
#endif
}

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

// Metal has all of these for half and float, so a call with an int is ambiguous there as it is here.
#define OF_EVERY_FLOAT(M) M(half) M(half2) M(half4) M(float) M(float2) M(float4)
#define FLOATS(T)                                                                                                   \
    T fma(T, T, T); T exp2(T); T exp(T); T log2(T); T log(T); T sin(T); T cos(T); T sqrt(T); T rsqrt(T); T rint(T); \
    T round(T); T floor(T); T ceil(T); T trunc(T); T fabs(T); T abs(T); T fmin(T, T); T fmax(T, T); T min(T, T);    \
    T max(T, T); T clamp(T, T, T); T pow(T, T); T sign(T); T mix(T, T, T); T select(T, T, bool);
#define INTS(T) T min(T, T); T max(T, T); T clamp(T, T, T); T abs(T); T rotate(T, T); T popcount(T); T select(T, T, bool);
OF_EVERY_FLOAT(FLOATS)
INTS(char) INTS(uchar) INTS(short) INTS(ushort) INTS(int) INTS(uint) INTS(long) INTS(ulong)
float dot(float2, float2);
float dot(float4, float4);
bool isfinite(float);
bool isnan(float);
bool isinf(float);

#define SIMD(T) T simd_shuffle(T, ushort); T simd_shuffle_xor(T, ushort);
SIMD(half) SIMD(float) SIMD(float2) SIMD(float4) SIMD(int) SIMD(uint) SIMD(ushort)
} // namespace metal
using namespace metal;
