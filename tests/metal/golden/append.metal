
// ... header ...
template <int D, int TRADITIONAL, typename T>
[[kernel]] void custom_kernel_ruvmlx_append__256_1_bfloat16_t_bfloat16_t_bfloat16_t_float_int32_t_uint8_t(
  const device bfloat16_t* k [[buffer(0)]],
  const device bfloat16_t* v [[buffer(1)]],
  const device float* turn [[buffer(2)]],
  const device int32_t* params [[buffer(3)]],
  device uint8_t* out [[buffer(4)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
// ... body ...

}

template [[host_name("custom_kernel_ruvmlx_append__256_1_bfloat16_t_bfloat16_t_bfloat16_t_float_int32_t_uint8_t")]] [[kernel]] decltype(custom_kernel_ruvmlx_append__256_1_bfloat16_t_bfloat16_t_bfloat16_t_float_int32_t_uint8_t<256, 1, bfloat16_t>) custom_kernel_ruvmlx_append__256_1_bfloat16_t_bfloat16_t_bfloat16_t_float_int32_t_uint8_t<256, 1, bfloat16_t>;
