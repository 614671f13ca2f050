
// ... header ...
template <int D>
[[kernel]] void custom_kernel_ruvmlx_gather__256_int32_t_int32_t_uint8_t_uint8_t_uint8_t_uint8_t_uint32_t(
  const device int32_t* params [[buffer(0)]],
  const device int32_t* pages [[buffer(1)]],
  const device uint8_t* cold [[buffer(2)]],
  const device uint8_t* warm [[buffer(3)]],
  const device uint8_t* hot [[buffer(4)]],
  const device uint8_t* fresh [[buffer(5)]],
  device uint32_t* out [[buffer(6)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
// ... body ...

}

template [[host_name("custom_kernel_ruvmlx_gather__256_int32_t_int32_t_uint8_t_uint8_t_uint8_t_uint8_t_uint32_t")]] [[kernel]] decltype(custom_kernel_ruvmlx_gather__256_int32_t_int32_t_uint8_t_uint8_t_uint8_t_uint8_t_uint32_t<256>) custom_kernel_ruvmlx_gather__256_int32_t_int32_t_uint8_t_uint8_t_uint8_t_uint8_t_uint32_t<256>;
