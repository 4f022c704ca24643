// One wrapper per PTX instruction that C++ cannot say, with the reason it is used.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace wonly::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same number, of which the compiler does not know how it was made: it stays in a register, where it would be made
// again at every use.
__device__ __forceinline__ int kept(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ int64_t kept(int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}

// blockIdx.x, read again: what follows from it is made again, and was not kept in registers.
__device__ __forceinline__ int block_again() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(block));
  return block;
}

// By address, for addresses that arithmetic has made.
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(address));
  return value;
}

// On a condition, without a branch.
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value, bool wanted) {
  asm volatile("{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %2, 0;\n@wanted st.shared.u32 [%0], %1;\n}\n" ::"r"(address),
               "r"(value), "r"(static_cast<int>(wanted))
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, const uint2& value, bool wanted) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %3, 0;\n@wanted st.shared.v2.u32 [%0], {%1, %2};\n}\n" ::"r"(address),
      "r"(value.x), "r"(value.y), "r"(static_cast<int>(wanted))
      : "memory");
}

// 16 bytes to row `row` of those of `row_bytes` from `to` on, on a condition: one multiplication for the address, of
// which the compiler makes one of 64 bits, and a branch, if it sees what `to` is made of.
__device__ __forceinline__ void store_in_row(void* to, int row, int row_bytes, const uint4& value, bool wanted) {
  asm volatile(
      "{\n.reg .pred wanted;\n.reg .b64 at;\nsetp.ne.b32 wanted, %7, 0;\nmad.wide.s32 at, %1, %2, %0;\n"
      "@wanted st.global.v4.u32 [at], {%3, %4, %5, %6};\n}\n" ::"l"(to),
      "r"(row), "r"(row_bytes), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(static_cast<int>(wanted))
      : "memory");
}

// sm_75 has neither asynchronous copies nor bf16 tensor cores: there copies are plain loads and stores, and bf16
// kernels are never launched (matmul.cu).

// 16 bytes global -> shared without passing through registers or L1.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(shared_address(shared)), "l"(global) : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}

// The same, or zeros, to an address in shared memory; without a branch.
__device__ __forceinline__ void cp_async_16_or_zeros(uint32_t shared, const void* global, bool wanted) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(wanted ? 16 : 0)
               : "memory");
#else
  __trap();
#endif
}

// 16 bytes that nobody reads again, on a condition; `to` stays as it is otherwise. In program order with the other
// volatile instructions: loads go out before the products that they are ahead of. The compiler may still put those of
// what nobody writes (kConstant) behind a barrier that they stand before, and other loads not.
template <bool kConstant = true>
__device__ __forceinline__ void load_once(uint4& to, const void* global, bool wanted) {
  if constexpr (kConstant) {
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %5, 0;\n"
        "@wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
        : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
        : "l"(global), "r"(static_cast<int>(wanted)));
  } else {
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %5, 0;\n"
        "@wanted ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
        : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
        : "l"(global), "r"(static_cast<int>(wanted)));
  }
}

#define WONLY_LOAD_PART(instruction)                                                                       \
  asm volatile("{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %2, 0;\n@wanted " instruction " %0, [%1];\n}\n" \
               : "+r"(to)                                                                                  \
               : "l"(global), "r"(static_cast<int>(wanted)))
// One, two or four bytes, likewise, into the low bits of a register that holds nothing else.
template <int kBytes, bool kConstant = true>
__device__ __forceinline__ void load_part(uint32_t& to, const void* global, bool wanted) {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4);
  if constexpr (kBytes == 1 && kConstant) {
    WONLY_LOAD_PART("ld.global.nc.u8");
  } else if constexpr (kBytes == 1) {
    WONLY_LOAD_PART("ld.global.u8");
  } else if constexpr (kBytes == 2 && kConstant) {
    WONLY_LOAD_PART("ld.global.nc.u16");
  } else if constexpr (kBytes == 2) {
    WONLY_LOAD_PART("ld.global.u16");
  } else if constexpr (kConstant) {
    WONLY_LOAD_PART("ld.global.nc.u32");
  } else {
    WONLY_LOAD_PART("ld.global.u32");
  }
}
#undef WONLY_LOAD_PART

// Four 8 x 8 matrices of 16-bit numbers, whose rows are where lanes 8i .. 8i + 7 say for matrix i: lane 4g + t gets
// columns 2t and 2t + 1 of row g.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row));
}

// The same, transposed: lane 4g + t gets rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// Small loads that stay where they are written: the compiler would move them to their use, and wait there.
__device__ __forceinline__ uint32_t load_8(const void* global) {
  uint32_t value;
  asm volatile("{\n.reg .u8 value;\nld.global.nc.u8 value, [%1];\ncvt.u32.u8 %0, value;\n}\n"
               : "=r"(value)
               : "l"(global));
  return value;
}
__device__ __forceinline__ uint32_t load_16(const void* global) {
  uint16_t value;
  asm volatile("ld.global.nc.u16 %0, [%1];\n" : "=h"(value) : "l"(global));
  return value;
}
__device__ __forceinline__ uint32_t load_32(const void* global) {
  uint32_t value;
  asm volatile("ld.global.nc.u32 %0, [%1];\n" : "=r"(value) : "l"(global));
  return value;
}

// 4 bytes global -> shared: the widest that any row of 16-bit scales with an even length is aligned to.
__device__ __forceinline__ void cp_async_4(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared_address(shared)), "l"(global) : "memory");
#else
  *static_cast<uint32_t*>(shared) = *static_cast<const uint32_t*>(global);
#endif
}

// 8 bytes: a row of scales of 16 bits whose length is a multiple of four. What follows in the row comes to the L2.
__device__ __forceinline__ void cp_async_8(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global.L2::256B [%0], [%1], 8;\n" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
#else
  *static_cast<uint2*>(shared) = *static_cast<const uint2*>(global);
#endif
}

__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

// Waits until at most `kPending` of this thread's newest groups are still on their way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
#endif
}

// The same for a number that is not a constant, 0 .. 6.
__device__ __forceinline__ void cp_async_wait_all_but(int pending) {
  switch (pending) {
    case 0:
      return cp_async_wait<0>();
    case 1:
      return cp_async_wait<1>();
    case 2:
      return cp_async_wait<2>();
    case 3:
      return cp_async_wait<3>();
    case 4:
      return cp_async_wait<4>();
    case 5:
      return cp_async_wait<5>();
    default:
      return cp_async_wait<6>();
  }
}

// d[16 x 8] += a[16 x 16] b[16 x 8] over a warp, accumulated in float32: lane 4g + t holds rows g, g + 8 of a and d,
// column g of b.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  __trap();
#endif
}

__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // the left half of the fragment, then the right half
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%7,%8}, {%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0), "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

template <bool kBf16>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kBf16) {
    mma_bf16(d, a, b0, b1);
  } else {
    mma_f16(d, a, b0, b1);
  }
}

// The same of an a of 16 x 8 numbers in tf32: lane 4g + t holds rows g, g + 8 of its columns t and t + 4.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  __trap();
#endif
}

// Rounded to tf32.
__device__ __forceinline__ float to_tf32(float value) {
#if __CUDA_ARCH__ >= 800
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(rounded) : "f"(value));
  return __uint_as_float(rounded);
#else
  __trap();
  return value;
#endif
}

// Transposes an 8 x 8 matrix of 16-bit numbers over a warp: lane 4g + t holds row g, columns 2t and 2t + 1, before and
// after. The packed format has pairs along the inputs, a product over the outputs wants them along those.
__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(matrix));
  return transposed;
}

// The same in program order with the other volatile instructions: ahead of products that its latency passes beside.
__device__ __forceinline__ uint32_t transpose_here(uint32_t matrix) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(matrix));
  return transposed;
}

// A half of a register in both of its halves. Instructions for pairs of 16-bit numbers take a half of an operand for
// both by themselves, which ptxas sees in this form but not in a permutation of bytes.
__device__ __forceinline__ uint32_t low_twice(uint32_t pair) {
  uint32_t d;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}\n" : "=r"(d) : "r"(pair));
  return d;
}
__device__ __forceinline__ uint32_t high_twice(uint32_t pair) {
  uint32_t d;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}\n" : "=r"(d) : "r"(pair));
  return d;
}

__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
#if __CUDA_ARCH__ >= 800
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  __trap();
#endif
}

// Two bf16 products in one instruction; fma with -0 because sm_80 has no mul.bf16x2 and x + -0 is x for every x.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) { return fma_bf16x2(a, b, 0x80008000u); }

// Approximately, to 2^-22 or so of the result; what is subnormal is zero.
__device__ __forceinline__ float reciprocal(float a) {
  float of;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(of) : "f"(a));
  return of;
}
__device__ __forceinline__ float power_of_two(float a) {
  float of;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(of) : "f"(a));
  return of;
}

// A NaN where either is one.
__device__ __forceinline__ float largest_of(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float of;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(of) : "f"(a), "f"(b));
  return of;
#else
  return isnan(b) || a < b ? b : a;
#endif
}
__device__ __forceinline__ float least_of(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float of;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(of) : "f"(a), "f"(b));
  return of;
#else
  return isnan(b) || a > b ? b : a;
#endif
}

// A line of memory to the L2.
__device__ __forceinline__ void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(global));
}

#if __CUDA_ARCH__ >= 900
// A contiguous run of bytes, aligned to 16 and a multiple of it, from memory to the L2: one thread's instruction, on
// its way before there is anything to put the bytes into.
__device__ __forceinline__ void prefetch(const void* global, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(global), "r"(bytes) : "memory");
}

// Thread-block clusters (sm_90): CTAs that share an output tile add their partial sums through each other's shared
// memory.
__device__ __forceinline__ int cluster_index() {  // along x
  int index;
  asm("mov.u32 %0, %%clusterid.x;\n" : "=r"(index));
  return index;
}
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}
// After a barrier of the CTA: what it wrote to its shared memory, the others of its cluster may read, and the reverse.
// One warp's fence stands for all that happened before that barrier; the cluster barrier's own release would have every
// warp wait for its fence.
__device__ __forceinline__ void cluster_share() {
  if (threadIdx.x < 32) asm volatile("fence.acq_rel.cluster;\n" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;\n" ::: "memory");
}
// No CTA leaves, and takes its shared memory with it, while another may still read that.
__device__ __forceinline__ void cluster_leave() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;\n" ::: "memory");
}

__device__ __forceinline__ float load_shared_of_rank(const float* shared, uint32_t rank) {
  uint32_t address;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];\n" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ float4 load4_shared_of_rank(const float* shared, uint32_t rank) {
  uint32_t address;
  float4 value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
#endif

}  // namespace wonly::ptx
