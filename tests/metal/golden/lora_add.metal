
// ... header ...
template <int R1, int R2>
[[kernel]] void custom_kernel_ruvmlx_lora_add__16_1_float_float_float_float_int32_t_float(
  const device float* y [[buffer(0)]],
  const device float* u [[buffer(1)]],
  const device float* b1 [[buffer(2)]],
  const device float* b2 [[buffer(3)]],
  const device int32_t* params [[buffer(4)]],
  device float* out [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
// ... body ...

}

template [[host_name("custom_kernel_ruvmlx_lora_add__16_1_float_float_float_float_int32_t_float")]] [[kernel]] decltype(custom_kernel_ruvmlx_lora_add__16_1_float_float_float_float_int32_t_float<16, 1>) custom_kernel_ruvmlx_lora_add__16_1_float_float_float_float_int32_t_float<16, 1>;
