// ... header ...
template <int D, int TRADITIONAL>
[[kernel]] void custom_kernel_ruvmlx_append__128_1_float_float_float_int32_t_uint8_t(
  const device float* k [[buffer(0)]],
  const device float* v [[buffer(1)]],
  const device float* turn [[buffer(2)]],
  const device int32_t* params [[buffer(3)]],
  device uint8_t* out [[buffer(4)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
// ... body ...

}

template [[host_name("custom_kernel_ruvmlx_append__128_1_float_float_float_int32_t_uint8_t")]] [[kernel]] decltype(custom_kernel_ruvmlx_append__128_1_float_float_float_int32_t_uint8_t<128, 1>) custom_kernel_ruvmlx_append__128_1_float_float_float_int32_t_uint8_t<128, 1>;

