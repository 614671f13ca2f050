// ... header ...
template <int D>
[[kernel]] void custom_kernel_ruvmlx_attend_merge__128_float_float_int32_t_float(
  const device float* o [[buffer(0)]],
  const device float* ml [[buffer(1)]],
  const device int32_t* params [[buffer(2)]],
  device float* out [[buffer(3)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
// ... body ...

}

template [[host_name("custom_kernel_ruvmlx_attend_merge__128_float_float_int32_t_float")]] [[kernel]] decltype(custom_kernel_ruvmlx_attend_merge__128_float_float_int32_t_float<128>) custom_kernel_ruvmlx_attend_merge__128_float_float_int32_t_float<128>;

