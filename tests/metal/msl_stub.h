// Enough of Metal's standard library for clang to check the types and address spaces of generated kernels.
// Test only: what these functions return does not matter.
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef _Float16 float16_t;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef float float4 __attribute__((ext_vector_type(4)));
typedef half half2 __attribute__((ext_vector_type(2)));

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
float simd_shuffle(float, ushort);
float simd_shuffle_xor(float, ushort);

template <typename T, typename U> T as_type(U x) {
    static_assert(sizeof(T) == sizeof(U), "as_type between sizes");
    return __builtin_bit_cast(T, x);
}

namespace metal {
float fma(float, float, float);
float exp2(float);
float rint(float);
float fabs(float);
float fmin(float, float);
float fmax(float, float);
float min(float, float);
float max(float, float);
int min(int, int);
int max(int, int);
uint min(uint, uint);
uint max(uint, uint);
template <typename T> T select(T, T, bool);
template <typename T> T rotate(T, T);
template <typename T> T clamp(T, T, T);
template <typename T> T dot(T, T);
} // namespace metal
using namespace metal;
