# The CPU module. One file per instruction set, each with its own flags; everything else is built for the base architecture.
set(wonly_cpu_sources ffi/bindings_cpu.cc ffi/cpu/handlers.cc ffi/cpu/isa.cc ffi/cpu/engine_generic.cc
    ffi/dequant/selftest_cpu.cc)
# Of a binary for two processors, which Apple has, both parts are portable.
set(wonly_processor "${CMAKE_SYSTEM_PROCESSOR}")
if(CMAKE_OSX_ARCHITECTURES)
  set(wonly_processor "${CMAKE_OSX_ARCHITECTURES}")
endif()
set(wonly_cpu_x86 OFF)
set(wonly_cpu_arm OFF)
if(wonly_processor MATCHES "^(x86_64|AMD64|amd64)$")
  set(wonly_cpu_x86 ON)
  list(APPEND wonly_cpu_sources ffi/cpu/engine_avx2.cc ffi/cpu/engine_avx2_vnni.cc ffi/cpu/engine_avx512.cc
       ffi/cpu/engine_avx512_vnni.cc ffi/cpu/engine_avx512_bf16.cc)
elseif(wonly_processor MATCHES "^(aarch64|arm64)$")
  set(wonly_cpu_arm ON)
  list(APPEND wonly_cpu_sources ffi/cpu/engine_neon.cc ffi/cpu/engine_neon_dotprod.cc)
endif()

wonly_module(_cpu ${wonly_cpu_sources})

# Products and sums are contracted only where the code says so: quantized codes must be the same on every platform.
set(wonly_optimized $<$<NOT:$<CONFIG:Debug>>:-O3>)
set(wonly_engine_options ${wonly_optimized} -ffp-contract=off -fno-math-errno -fno-trapping-math)
set_source_files_properties(ffi/cpu/handlers.cc PROPERTIES COMPILE_OPTIONS "${wonly_optimized}")
# -Wno-psabi: vectors wider than the target's registers are passed in memory, among functions of this one file.
set_source_files_properties(ffi/cpu/engine_generic.cc PROPERTIES COMPILE_OPTIONS "${wonly_engine_options};-Wno-psabi")
if(wonly_cpu_x86)
  target_compile_definitions(_cpu PRIVATE WONLY_CPU_X86=1)
  set(wonly_avx512_options -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mprefer-vector-width=512)
  set_source_files_properties(ffi/cpu/engine_avx2.cc PROPERTIES COMPILE_OPTIONS "${wonly_engine_options};-mavx2;-mfma")
  set_source_files_properties(ffi/cpu/engine_avx2_vnni.cc
                              PROPERTIES COMPILE_OPTIONS "${wonly_engine_options};-mavx2;-mfma;-mavxvnni")
  set_source_files_properties(ffi/cpu/engine_avx512.cc
                              PROPERTIES COMPILE_OPTIONS "${wonly_engine_options};${wonly_avx512_options}")
  set_source_files_properties(ffi/cpu/engine_avx512_vnni.cc
                              PROPERTIES COMPILE_OPTIONS "${wonly_engine_options};${wonly_avx512_options};-mavx512vnni")
  set_source_files_properties(
    ffi/cpu/engine_avx512_bf16.cc
    PROPERTIES COMPILE_OPTIONS "${wonly_engine_options};${wonly_avx512_options};-mavx512vnni;-mavx512bf16")
endif()
if(wonly_cpu_arm)
  target_compile_definitions(_cpu PRIVATE WONLY_CPU_ARM=1)
  set_source_files_properties(ffi/cpu/engine_neon.cc PROPERTIES COMPILE_OPTIONS "${wonly_engine_options}")
  set_source_files_properties(ffi/cpu/engine_neon_dotprod.cc
                              PROPERTIES COMPILE_OPTIONS "${wonly_engine_options};-march=armv8.2-a+dotprod")
endif()
