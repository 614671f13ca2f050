
// ... header ...
template <int R1, int R2>
[[kernel]] void custom_kernel_ruvmlx_lora_project__16_1_float_float_float_int32_t_float(
  const device float* x [[buffer(0)]],
  const device float* a1 [[buffer(1)]],
  const device float* a2 [[buffer(2)]],
  const device int32_t* params [[buffer(3)]],
  device float* u [[buffer(4)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
// ... body ...

}

template [[host_name("custom_kernel_ruvmlx_lora_project__16_1_float_float_float_int32_t_float")]] [[kernel]] decltype(custom_kernel_ruvmlx_lora_project__16_1_float_float_float_int32_t_float<16, 1>) custom_kernel_ruvmlx_lora_project__16_1_float_float_float_int32_t_float<16, 1>;
