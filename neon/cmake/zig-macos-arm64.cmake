# This file builds librvm.dylib for Apple Silicon on any machine. zig has clang, a linker and the headers of every target.
#   cmake -DCMAKE_TOOLCHAIN_FILE=neon/cmake/zig-macos-arm64.cmake -DRVM_ZIG=/path/to/zig ...
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(RVM_ZIG zig CACHE FILEPATH "the zig program, as PyPI's ziglang brings it")
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES RVM_ZIG)
set(CMAKE_C_COMPILER ${RVM_ZIG})
set(CMAKE_C_COMPILER_ARG1 "cc -target aarch64-macos.14.0 -mcpu=apple_m1") # the oldest macOS that MLX runs on
