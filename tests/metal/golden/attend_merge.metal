
// ... header ...
template <int D, typename T>
[[kernel]] void custom_kernel_ruvmlx_attend_merge__256_bfloat16_t_float_float_int32_t_bfloat16_t(
  const device float* o [[buffer(0)]],
  const device float* ml [[buffer(1)]],
  const device int32_t* params [[buffer(2)]],
  device bfloat16_t* out [[buffer(3)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
// ... body ...

}

template [[host_name("custom_kernel_ruvmlx_attend_merge__256_bfloat16_t_float_float_int32_t_bfloat16_t")]] [[kernel]] decltype(custom_kernel_ruvmlx_attend_merge__256_bfloat16_t_float_float_int32_t_bfloat16_t<256, bfloat16_t>) custom_kernel_ruvmlx_attend_merge__256_bfloat16_t_float_float_int32_t_bfloat16_t<256, bfloat16_t>;
