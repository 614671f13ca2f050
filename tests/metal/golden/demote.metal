
// ... header ...
template <int D, int TO>
[[kernel]] void custom_kernel_ruvmlx_demote__256_1_uint8_t_int32_t_int32_t_uint8_t(
  const device uint8_t* pool [[buffer(0)]],
  const device int32_t* ids [[buffer(1)]],
  const device int32_t* params [[buffer(2)]],
  device uint8_t* out [[buffer(3)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
// ... body ...

}

template [[host_name("custom_kernel_ruvmlx_demote__256_1_uint8_t_int32_t_int32_t_uint8_t")]] [[kernel]] decltype(custom_kernel_ruvmlx_demote__256_1_uint8_t_int32_t_int32_t_uint8_t<256, 1>) custom_kernel_ruvmlx_demote__256_1_uint8_t_int32_t_int32_t_uint8_t<256, 1>;
