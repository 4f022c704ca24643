// Kernels for both types of 16 bits. What follows the products of a tile is most of a kernel and hardly asks for their
// type, so that one with a loop for each is three fifths of the code of two. Only for kernels that were measured: ptxas
// may place loops and their registers otherwise, which took up to 4% longer (docs/performance.md, log 185).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "abi.h"
#include "cuda/element.cuh"

namespace wonly {

// In the place of __half or __nv_bfloat16: either, as the arguments say.
struct Either {};

template <typename X_>
struct TypeOf {
  using X = X_;
};

// run(TypeOf<X>{}), where X is `T`, or if that is Either what `type` says.
template <typename T, typename Run>
__device__ __forceinline__ void with_type(DType type, Run&& run) {
  if constexpr (!std::is_same_v<T, Either>) {
    run(TypeOf<T>{});
  } else if (__builtin_expect(type == DType::kBF16, 1)) {
    run(TypeOf<__nv_bfloat16>{});
  } else {
    run(TypeOf<__half>{});
  }
}

// Two numbers, rounded.
template <typename T>
__device__ __forceinline__ uint32_t round_two(DType type, float low, float high) {
  uint32_t pair;
  with_type<T>(type, [&](auto of) { pair = from_float2<typename decltype(of)::X>(low, high); });
  return pair;
}

}  // namespace wonly
