// These macros and functions define the words of the kernels' dialect in Metal. README.md explains each word.
// dialect_cuda.h and dialect_sim.h define the same words, and the words for matrix units.
#define FN inline
#define CONST_FN inline constexpr
// CONSTANT: use this word only outside functions: there Metal requires an address space, and inside functions Metal
// forbids it
#define CONSTANT constant constexpr
#define THREAD thread
#define GLOBAL_IN(T) const device T *
#define GLOBAL_OUT(T) device T *
#define LOCAL(T) threadgroup T *
#define SHARED(T, name, n) alignas(16) threadgroup T name[n]
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SIMD_BARRIER() simdgroup_barrier(mem_flags::mem_threadgroup)
#define UNROLL _Pragma("clang loop unroll(full)")

// KERNEL_START is no macro in Metal. backends/mlx/kernels/source.py replaces this word in the body's text, because
// mx.fast.metal_kernel searches the text for the names of thread positions.

FN float shuffle_xor(float x, ushort mask) { return simd_shuffle_xor(x, mask); }
FN float shuffle(float x, ushort from) { return simd_shuffle(x, from); }

FN float product(float x, float y) {
#pragma METAL fp contract(off)
    return x * y;
}
FN float as_f32(uint bits) { return as_type<float>(bits); }
FN uint as_u32(float x) { return as_type<uint>(x); }
FN float half_to_f32(uint bits) { return float(as_type<half>(ushort(bits))); }
FN uint f32_to_half(float x) { return as_type<ushort>(half(x)); }

FN uint load_u32(const device uchar *p, uint at) { return *(const device uint *)(p + at); }
FN uint2 load_u32x2(const device uchar *p, uint at) { return *(const device uint2 *)(p + at); }
FN uint4 load_u32x4(const device uchar *p, uint at) { return *(const device uint4 *)(p + at); }
FN uint load_u16(const device uchar *p, uint at) { return *(const device ushort *)(p + at); }
FN void store_u16(device uchar *p, uint at, uint x) { *(device ushort *)(p + at) = ushort(x); }
FN void store_u32(device uchar *p, uint at, uint x) { *(device uint *)(p + at) = x; }
FN void store_u32x4(device uchar *p, uint at, uint4 x) { *(device uint4 *)(p + at) = x; }
