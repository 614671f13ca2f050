
// ... header ...
template <int D, int G>
[[kernel]] void custom_kernel_ruvmlx_attend_decode_alibi__256_2_float_float_int32_t_int32_t_uint8_t_uint8_t_uint8_t_uint8_t_float_float_float(
  const device float* q [[buffer(0)]],
  const device float* q_rotated [[buffer(1)]],
  const device int32_t* params [[buffer(2)]],
  const device int32_t* pages [[buffer(3)]],
  const device uint8_t* cold [[buffer(4)]],
  const device uint8_t* warm [[buffer(5)]],
  const device uint8_t* hot [[buffer(6)]],
  const device uint8_t* open [[buffer(7)]],
  const device float* slopes [[buffer(8)]],
  device float* o [[buffer(9)]],
  device float* ml [[buffer(10)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
// ... body ...

}

template [[host_name("custom_kernel_ruvmlx_attend_decode_alibi__256_2_float_float_int32_t_int32_t_uint8_t_uint8_t_uint8_t_uint8_t_float_float_float")]] [[kernel]] decltype(custom_kernel_ruvmlx_attend_decode_alibi__256_2_float_float_int32_t_int32_t_uint8_t_uint8_t_uint8_t_uint8_t_float_float_float<256, 2>) custom_kernel_ruvmlx_attend_decode_alibi__256_2_float_float_int32_t_int32_t_uint8_t_uint8_t_uint8_t_uint8_t_float_float_float<256, 2>;
