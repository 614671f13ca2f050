
// ... header ...
[[kernel]] void custom_kernel_ruvmlx_micro_update_float_float_float_int32_t_float_float_int32_t(
  const device float* w [[buffer(0)]],
  const device float* velocity [[buffer(1)]],
  const device float* g [[buffer(2)]],
  const device int32_t* params [[buffer(3)]],
  device float* w_new [[buffer(4)]],
  device float* velocity_new [[buffer(5)]],
  device int32_t* bad [[buffer(6)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
// ... body ...

}
