
// ... header ...
template <int D, int TRADITIONAL, typename T>
[[kernel]] void custom_kernel_ruvmlx_rope_append__256_1_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_float_uint8_t_int32_t_float_float_uint8_t(
  const device bfloat16_t* q [[buffer(0)]],
  const device bfloat16_t* k [[buffer(1)]],
  const device bfloat16_t* v [[buffer(2)]],
  const device float* turn [[buffer(3)]],
  const device uint8_t* open [[buffer(4)]],
  const device int32_t* params [[buffer(5)]],
  device float* q_out [[buffer(6)]],
  device float* q_rotated [[buffer(7)]],
  device uint8_t* open_out [[buffer(8)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
// ... body ...

}

template [[host_name("custom_kernel_ruvmlx_rope_append__256_1_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_float_uint8_t_int32_t_float_float_uint8_t")]] [[kernel]] decltype(custom_kernel_ruvmlx_rope_append__256_1_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_float_uint8_t_int32_t_float_float_uint8_t<256, 1, bfloat16_t>) custom_kernel_ruvmlx_rope_append__256_1_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_float_uint8_t_int32_t_float_float_uint8_t<256, 1, bfloat16_t>;
