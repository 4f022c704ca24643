// wgmma of sm_90a, in every type and number of columns that the kernels use.
#pragma once

#include "cuda/ptx_sm90.cuh"

namespace wonly::ptx {

// d[64 x kN] = a[64 x 16] b[16 x kN] (+ d where `accumulate`) over a warpgroup, b in shared memory as wgmma_descriptor
// says: rows of the 16 numbers that are summed over. Warp w's fragments of an a in registers are those of mma.m16n8k16
// for rows 16w.., its d a row of kN / 8 such accumulators.
template <int kN>
struct Wgmma;
// The same with a in shared memory, as b.
template <int kN>
struct WgmmaShared;
// The same with rows of a's 64, and of b's kN numbers, in shared memory, one for each of the 16 that are summed over,
// as wgmma_descriptor_transposed says.
template <int kN>
struct WgmmaTransposed;
// d[64 x kN] = a[64 x 32] b[32 x kN] in int32 of signed bytes or float32 of e4m3, a in registers: as Wgmma, fragments
// being those of mma.m16n8k32.
template <int kN>
struct WgmmaBytes;

// The first so many operands of an instruction, which are d, and what they are bound to from d[i] on.
// clang-format off
#define WONLY_D4 "%0, %1, %2, %3"
#define WONLY_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WONLY_D12 WONLY_D8 ", %8, %9, %10, %11"
#define WONLY_D16 WONLY_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WONLY_D24 WONLY_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WONLY_D32 WONLY_D16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WONLY_D36 WONLY_D32 ", %32, %33, %34, %35"
#define WONLY_D40 WONLY_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WONLY_D48 WONLY_D32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WONLY_D52 WONLY_D48 ", %48, %49, %50, %51"
#define WONLY_D56 WONLY_D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WONLY_D60 WONLY_D56 ", %56, %57, %58, %59"
#define WONLY_D64 WONLY_D32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WONLY_D68 WONLY_D64 ", %64, %65, %66, %67"
#define WONLY_D72 WONLY_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WONLY_D76 WONLY_D72 ", %72, %73, %74, %75"
#define WONLY_D80 WONLY_D64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WONLY_D84 WONLY_D80 ", %80, %81, %82, %83"
#define WONLY_D88 WONLY_D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WONLY_D92 WONLY_D88 ", %88, %89, %90, %91"
#define WONLY_D96 WONLY_D80 \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WONLY_D100 WONLY_D96 ", %96, %97, %98, %99"
#define WONLY_D104 WONLY_D96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WONLY_D108 WONLY_D104 ", %104, %105, %106, %107"
#define WONLY_D112 WONLY_D96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define WONLY_D116 WONLY_D112 ", %112, %113, %114, %115"
#define WONLY_D120 WONLY_D112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WONLY_D124 WONLY_D120 ", %120, %121, %122, %123"
#define WONLY_D128 WONLY_D112 \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WONLY_OF4(bound, i) "+" bound(d[i]), "+" bound(d[i + 1]), "+" bound(d[i + 2]), "+" bound(d[i + 3])
#define WONLY_OF8(bound, i)                                                                        \
  "+" bound(d[i]), "+" bound(d[i + 1]), "+" bound(d[i + 2]), "+" bound(d[i + 3]),                  \
  "+" bound(d[i + 4]), "+" bound(d[i + 5]), "+" bound(d[i + 6]), "+" bound(d[i + 7])
#define WONLY_OF12(bound, i) WONLY_OF8(bound, i), WONLY_OF4(bound, i + 8)
#define WONLY_OF16(bound, i) WONLY_OF8(bound, i), WONLY_OF8(bound, i + 8)
#define WONLY_OF24(bound, i) WONLY_OF16(bound, i), WONLY_OF8(bound, i + 16)
#define WONLY_OF32(bound, i) WONLY_OF16(bound, i), WONLY_OF16(bound, i + 16)
#define WONLY_OF36(bound, i) WONLY_OF32(bound, i), WONLY_OF4(bound, i + 32)
#define WONLY_OF40(bound, i) WONLY_OF32(bound, i), WONLY_OF8(bound, i + 32)
#define WONLY_OF48(bound, i) WONLY_OF32(bound, i), WONLY_OF16(bound, i + 32)
#define WONLY_OF52(bound, i) WONLY_OF48(bound, i), WONLY_OF4(bound, i + 48)
#define WONLY_OF56(bound, i) WONLY_OF48(bound, i), WONLY_OF8(bound, i + 48)
#define WONLY_OF60(bound, i) WONLY_OF56(bound, i), WONLY_OF4(bound, i + 56)
#define WONLY_OF64(bound, i) WONLY_OF32(bound, i), WONLY_OF32(bound, i + 32)
#define WONLY_OF68(bound, i) WONLY_OF64(bound, i), WONLY_OF4(bound, i + 64)
#define WONLY_OF72(bound, i) WONLY_OF64(bound, i), WONLY_OF8(bound, i + 64)
#define WONLY_OF76(bound, i) WONLY_OF72(bound, i), WONLY_OF4(bound, i + 72)
#define WONLY_OF80(bound, i) WONLY_OF64(bound, i), WONLY_OF16(bound, i + 64)
#define WONLY_OF84(bound, i) WONLY_OF80(bound, i), WONLY_OF4(bound, i + 80)
#define WONLY_OF88(bound, i) WONLY_OF80(bound, i), WONLY_OF8(bound, i + 80)
#define WONLY_OF92(bound, i) WONLY_OF88(bound, i), WONLY_OF4(bound, i + 88)
#define WONLY_OF96(bound, i) WONLY_OF64(bound, i), WONLY_OF32(bound, i + 64)
#define WONLY_OF100(bound, i) WONLY_OF96(bound, i), WONLY_OF4(bound, i + 96)
#define WONLY_OF104(bound, i) WONLY_OF96(bound, i), WONLY_OF8(bound, i + 96)
#define WONLY_OF108(bound, i) WONLY_OF104(bound, i), WONLY_OF4(bound, i + 104)
#define WONLY_OF112(bound, i) WONLY_OF96(bound, i), WONLY_OF16(bound, i + 96)
#define WONLY_OF116(bound, i) WONLY_OF112(bound, i), WONLY_OF4(bound, i + 112)
#define WONLY_OF120(bound, i) WONLY_OF112(bound, i), WONLY_OF8(bound, i + 112)
#define WONLY_OF124(bound, i) WONLY_OF120(bound, i), WONLY_OF4(bound, i + 120)
#define WONLY_OF128(bound, i) WONLY_OF64(bound, i), WONLY_OF64(bound, i + 64)
// clang-format on

// One function, of the name of its operands' type; the operands after d have the numbers a0 .. accumulate_. `ends`:
// what the instruction has after the predicate.
#define WONLY_WGMMA_OF(name, Sum, bound, shape_and_types, ends, kSums, a0, a1, a2, a3, b_, accumulate_)             \
  __device__ __forceinline__ static void name(Sum(&d)[kSums], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate_                                                  \
                 ", 0;\n"                                                                                           \
                 "wgmma.mma_async.sync.aligned." shape_and_types " {" WONLY_D##kSums                                \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_ ", p" ends ";\n}\n"                           \
                 : WONLY_OF##kSums(bound, 0)                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                            \
  }
#define WONLY_WGMMA(T, kN, kSums, ...) \
  WONLY_WGMMA_OF(T, float, "f", "m64n" #kN "k16.f32." #T "." #T, ", 1, 1, 0", kSums, __VA_ARGS__)
#define WONLY_WGMMA_S8(kN, kSums, ...) WONLY_WGMMA_OF(s8, int, "r", "m64n" #kN "k32.s32.s8.s8", "", kSums, __VA_ARGS__)
#define WONLY_WGMMA_E4M3(kN, kSums, ...) \
  WONLY_WGMMA_OF(e4m3, float, "f", "m64n" #kN "k32.f32.e4m3.e4m3", ", 1, 1", kSums, __VA_ARGS__)
#define WONLY_WGMMA_SHARED_OF(T, transposed, kN, kSums, a_, b_, accumulate_)                            \
  __device__ __forceinline__ static void T(float (&d)[kSums], uint64_t a, uint64_t b, int accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate_                                      \
                 ", 0;\n"                                                                               \
                 "wgmma.mma_async.sync.aligned.m64n" #kN "k16.f32." #T "." #T " {" WONLY_D##kSums       \
                 "}, %" #a_ ", %" #b_ ", p, 1, 1" transposed ";\n}\n"                                   \
                 : WONLY_OF##kSums("f", 0)                                                              \
                 : "l"(a), "l"(b), "r"(accumulate));                                                    \
  }
#define WONLY_WGMMA_SHARED(T, ...) WONLY_WGMMA_SHARED_OF(T, ", 0, 0", __VA_ARGS__)
#define WONLY_WGMMA_TRANSPOSED(T, ...) WONLY_WGMMA_SHARED_OF(T, ", 1, 1", __VA_ARGS__)

// Both 16-bit types of so many columns.
#define WONLY_WGMMA_TYPES(Struct, function, kN, ...)               \
  template <>                                                      \
  struct Struct<kN> {                                              \
    function(bf16, kN, __VA_ARGS__) function(f16, kN, __VA_ARGS__) \
  };

WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 8, 4, 4, 5, 6, 7, 8, 9)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 16, 8, 8, 9, 10, 11, 12, 13)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 24, 12, 12, 13, 14, 15, 16, 17)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 32, 16, 16, 17, 18, 19, 20, 21)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 48, 24, 24, 25, 26, 27, 28, 29)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 64, 32, 32, 33, 34, 35, 36, 37)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 72, 36, 36, 37, 38, 39, 40, 41)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 80, 40, 40, 41, 42, 43, 44, 45)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 96, 48, 48, 49, 50, 51, 52, 53)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 104, 52, 52, 53, 54, 55, 56, 57)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 112, 56, 56, 57, 58, 59, 60, 61)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 120, 60, 60, 61, 62, 63, 64, 65)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 128, 64, 64, 65, 66, 67, 68, 69)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 136, 68, 68, 69, 70, 71, 72, 73)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 144, 72, 72, 73, 74, 75, 76, 77)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 152, 76, 76, 77, 78, 79, 80, 81)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 160, 80, 80, 81, 82, 83, 84, 85)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 168, 84, 84, 85, 86, 87, 88, 89)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 176, 88, 88, 89, 90, 91, 92, 93)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 184, 92, 92, 93, 94, 95, 96, 97)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 192, 96, 96, 97, 98, 99, 100, 101)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 200, 100, 100, 101, 102, 103, 104, 105)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 208, 104, 104, 105, 106, 107, 108, 109)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 216, 108, 108, 109, 110, 111, 112, 113)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 224, 112, 112, 113, 114, 115, 116, 117)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 232, 116, 116, 117, 118, 119, 120, 121)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 240, 120, 120, 121, 122, 123, 124, 125)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 248, 124, 124, 125, 126, 127, 128, 129)
WONLY_WGMMA_TYPES(Wgmma, WONLY_WGMMA, 256, 128, 128, 129, 130, 131, 132, 133)
WONLY_WGMMA_TYPES(WgmmaShared, WONLY_WGMMA_SHARED, 8, 4, 4, 5, 6)
WONLY_WGMMA_TYPES(WgmmaShared, WONLY_WGMMA_SHARED, 64, 32, 32, 33, 34)
WONLY_WGMMA_TYPES(WgmmaShared, WONLY_WGMMA_SHARED, 128, 64, 64, 65, 66)
WONLY_WGMMA_TYPES(WgmmaShared, WONLY_WGMMA_SHARED, 256, 128, 128, 129, 130)
WONLY_WGMMA_TYPES(WgmmaTransposed, WONLY_WGMMA_TRANSPOSED, 256, 128, 128, 129, 130)

template <>
struct WgmmaBytes<32> {
  WONLY_WGMMA_S8(32, 16, 16, 17, 18, 19, 20, 21)
  WONLY_WGMMA_E4M3(32, 16, 16, 17, 18, 19, 20, 21)
};
template <>
struct WgmmaBytes<64> {
  WONLY_WGMMA_S8(64, 32, 32, 33, 34, 35, 36, 37)
  WONLY_WGMMA_E4M3(64, 32, 32, 33, 34, 35, 36, 37)
};
template <>
struct WgmmaBytes<256> {
  WONLY_WGMMA_S8(256, 128, 128, 129, 130, 131, 132, 133)
};

#undef WONLY_WGMMA_OF
#undef WONLY_WGMMA
#undef WONLY_WGMMA_S8
#undef WONLY_WGMMA_E4M3
#undef WONLY_WGMMA_SHARED_OF
#undef WONLY_WGMMA_SHARED
#undef WONLY_WGMMA_TRANSPOSED
#undef WONLY_WGMMA_TYPES
#undef WONLY_D4
#undef WONLY_D8
#undef WONLY_D12
#undef WONLY_D16
#undef WONLY_D24
#undef WONLY_D32
#undef WONLY_D36
#undef WONLY_D40
#undef WONLY_D48
#undef WONLY_D52
#undef WONLY_D56
#undef WONLY_D60
#undef WONLY_D64
#undef WONLY_D72
#undef WONLY_D80
#undef WONLY_D84
#undef WONLY_D88
#undef WONLY_D92
#undef WONLY_D96
#undef WONLY_D100
#undef WONLY_D104
#undef WONLY_D108
#undef WONLY_D112
#undef WONLY_D116
#undef WONLY_D120
#undef WONLY_D124
#undef WONLY_D128
#undef WONLY_OF4
#undef WONLY_OF8
#undef WONLY_OF12
#undef WONLY_OF16
#undef WONLY_OF24
#undef WONLY_OF32
#undef WONLY_OF36
#undef WONLY_OF40
#undef WONLY_OF48
#undef WONLY_OF52
#undef WONLY_OF56
#undef WONLY_OF60
#undef WONLY_OF64
#undef WONLY_OF72
#undef WONLY_OF80
#undef WONLY_OF84
#undef WONLY_OF88
#undef WONLY_OF92
#undef WONLY_OF96
#undef WONLY_OF100
#undef WONLY_OF104
#undef WONLY_OF108
#undef WONLY_OF112
#undef WONLY_OF116
#undef WONLY_OF120
#undef WONLY_OF124
#undef WONLY_OF128

}  // namespace wonly::ptx
