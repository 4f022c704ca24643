// The warpgroup products of sm_90a: mbarriers, bulk copies by the copy engine, and wgmma with its A operand in
// registers.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/ptx.cuh"

namespace wonly::ptx {

// Two floats, eight apart, to row `row` of those of `row_bytes` from `to` on, if `at` is below `end` and `second_end`:
// as store_in_row.
__device__ __forceinline__ void store_two_in_row(float* to, int row, int row_bytes, float first, float second, int at,
                                                 int end, int second_end) {
  asm volatile(
      "{\n.reg .pred first, second;\n.reg .b64 to;\nsetp.lt.s32 first, %5, %6;\nsetp.lt.s32 second, %5, %7;\n"
      "mad.wide.s32 to, %1, %2, %0;\n@first st.global.f32 [to], %3;\n@second st.global.f32 [to+32], %4;\n}\n" ::"l"(to),
      "r"(row), "r"(row_bytes), "f"(first), "f"(second), "r"(at), "r"(end), "r"(second_end)
      : "memory");
}

// Of a warp, when it is done with a slot. One lane speaks for all, after the warp has synchronised; racecheck takes
// only what a lane itself arrives for as ordered, so tests/reliability/sanitize_gpu.py has each of them arrive.
#ifdef WONLY_EVERY_LANE_ARRIVES
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif
__device__ __forceinline__ bool arrives(int lane) { return kArrivals == 32 || lane == 0; }

// Barriers in shared memory that count arrivals and the bytes of bulk copies, so that a consumer waits for exactly its
// data.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}
// Without a branch.
__device__ __forceinline__ void barrier_arrive_if(uint64_t* barrier, bool arrives) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(
                   shared_address(barrier)),
               "r"(static_cast<int>(arrives))
               : "memory");
}
// By a warp, all of whose lanes are done. ptxas lets what follows write to registers of the whole warp while one lane
// has yet to arrive, unless they meet again, and where the arrival is on a condition, too (docs/performance.md, log
// 173).
__device__ __forceinline__ void warp_arrive(uint64_t* barrier, int lane) {
  __syncwarp();
  if (arrives(lane)) barrier_arrive(barrier);
  __syncwarp();
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

// At the same barrier of another CTA of the cluster.
__device__ __forceinline__ void barrier_arrive_at_rank(uint64_t* barrier, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(address) : "memory");
}
// Where that CTA has what is at `shared` here.
__device__ __forceinline__ uint32_t address_at_rank(const void* shared, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
  return address;
}
// At a barrier at such an address, without a branch.
__device__ __forceinline__ void barrier_arrive_at_if(uint32_t address, bool arrives) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n}\n" ::"r"(address),
      "r"(static_cast<int>(arrives))
      : "memory");
}
// Both without a branch: where `here` at the barrier, and where `there` at the same one of CTA `rank`.
__device__ __forceinline__ void barrier_arrive_twice(uint64_t* barrier, bool here, bool there, int rank) {
  asm volatile(
      "{\n.reg .pred here, there;\n.reg .u32 at;\nsetp.ne.b32 here, %1, 0;\nsetp.ne.b32 there, %2, 0;\n"
      "@here mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "mapa.shared::cluster.u32 at, %0, %3;\n"
      "@there mbarrier.arrive.shared::cluster.b64 _, [at];\n}\n" ::"r"(shared_address(barrier)),
      "r"(static_cast<int>(here)), "r"(static_cast<int>(there)), "r"(rank)
      : "memory");
}
// Sixteen bytes into the shared memory of another CTA of the cluster, where they count for a barrier at the same place
// as `barrier` is here: whoever waits for that sees them, without a fence.
__device__ __forceinline__ void store_async_at_rank(void* shared, const float4& v, uint64_t* barrier, int rank) {
  asm volatile(
      "{\n.reg .u32 to, counted;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 counted, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {%3, %4, %5, %6}, [counted];\n}\n" ::"r"(
          shared_address(shared)),
      "r"(shared_address(barrier)), "r"(rank), "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)),
      "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w))
      : "memory");
}
// All threads of the cluster have come here; nothing of what they wrote.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void cluster_meet() {
  cluster_arrive();
  cluster_wait();
}
// The threads of one warpgroup.
template <int kBarrier>
__device__ __forceinline__ void warpgroup_sync() {
  asm volatile("bar.sync %0, 128;\n" ::"n"(kBarrier) : "memory");
}

// A barrier of `kThreads` threads, of which some wait and others go on.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_sync() {
  asm volatile("bar.sync %0, %1;\n" ::"n"(kBarrier), "n"(kThreads) : "memory");
}
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_arrive() {
  asm volatile("bar.arrive %0, %1;\n" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// A word in global memory by which a thread hands over what was written before; who finds it handed over, finds that
// too, and must make the word 0. So it need not be cleared before a launch, which took longer than some products: a
// buffer holds whatever it held, but this random number only by a chance of 2^-64.
constexpr uint64_t kHandedOver = 0x64e8cc2eb4c1ac7a;
__device__ __forceinline__ void hand_over(uint64_t* word) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;\n" ::"l"(word), "l"(kHandedOver) : "memory");
}
__device__ __forceinline__ bool handed_over(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];\n" : "=l"(value) : "l"(word) : "memory");
  return value == kHandedOver;
}

// Four 8 x 8 matrices of 16-bit numbers, transposed: lane l holds two neighbours of column l / 4 of each, and gives the
// address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices_transposed(void* shared, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared_address(shared)),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// One lane of a converged warp; the compiler knows that the others hold the same values.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}\n" : "=r"(elected));
  return elected != 0;
}

// A contiguous run of bytes (a multiple of 16) global -> shared: one instruction of one thread keeps kilobytes in
// flight.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// The same from this CTA's shared memory into that of another one of the cluster, where it counts for a barrier at the
// same place as `barrier` is here.
__device__ __forceinline__ void bulk_copy_to_rank(void* to, const void* from, int bytes, uint64_t* barrier, int rank) {
  asm volatile(
      "{\n.reg .u32 to, counted;\n"
      "mapa.shared::cluster.u32 to, %0, %4;\n"
      "mapa.shared::cluster.u32 counted, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%1], %2, [counted];\n}\n" ::"r"(
          shared_address(to)),
      "r"(shared_address(from)), "r"(bytes), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}
// A box of a tensor, zeros beyond its edges, in the swizzled order that wgmma reads without bank conflicts.
__device__ __forceinline__ void tensor_copy_3d(void* shared, const CUtensorMap* map, int x, int y, int z,
                                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];\n" ::
          "r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void tensor_copy_4d(void* shared, const CUtensorMap* map, int x, int y, int z, int w,
                                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];\n" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
      : "memory");
}

// The reverse, without what lies beyond the edges. By a thread that saw what others wrote, and made it what the copy
// engine may read.
__device__ __forceinline__ void tensor_store_3d(const CUtensorMap* map, const void* shared, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n" ::"l"(map), "r"(x),
               "r"(y), "r"(z), "r"(shared_address(shared))
               : "memory");
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
// This thread's stores have read what they store.
__device__ __forceinline__ void tensor_stores_wait() {
  asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}

// What the kernel before has written may be read from here on, where this one was launched early.
__device__ __forceinline__ void wait_for_last_kernel() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }
// The next kernel may begin once all CTAs have come here; LaunchShape::early.
__device__ __forceinline__ void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;\n"); }

// Ahead of the first copy by it.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// The same to several CTAs of the cluster, those of `ranks`: at the same place, and counted by the same barrier, of
// each.
__device__ __forceinline__ void tensor_copy_3d_multicast(void* shared, const CUtensorMap* map, int x, int y, int z,
                                                         uint64_t* barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;\n" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(ranks)
      : "memory");
}

// Successive pixels of a convolution's result, at one tap: 64 inputs from `channel` on of the pixels of x that they
// meet, the first at (x, y) of `image`, moved by (column, row); zeros where those lie outside of the image.
__device__ __forceinline__ void tensor_copy_pixels_multicast(void* shared, const CUtensorMap* map, int channel, int x,
                                                             int y, int image, uint16_t column, uint16_t row,
                                                             uint64_t* barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8}, %9;\n" ::"r"(shared_address(shared)),
      "l"(map), "r"(channel), "r"(x), "r"(y), "r"(image), "r"(shared_address(barrier)), "h"(column), "h"(row),
      "h"(ranks)
      : "memory");
}

// The same to this CTA alone.
__device__ __forceinline__ void tensor_copy_pixels(void* shared, const CUtensorMap* map, int channel, int x, int y,
                                                   int image, uint16_t column, uint16_t row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};\n" ::"r"(shared_address(shared)),
      "l"(map), "r"(channel), "r"(x), "r"(y), "r"(image), "r"(shared_address(barrier)), "h"(column), "h"(row)
      : "memory");
}

// Moves registers between warpgroups: every warp of the warpgroup executes it.
template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Orders register writes before the wgmma instructions that read them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// threadIdx.x, read here: nothing that is made of it is computed earlier.
__device__ __forceinline__ int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Keeps the compiler from moving accumulators while wgmma owns them.
template <typename T, int kCount>
__device__ __forceinline__ void keep(T (&registers)[kCount]) {
#pragma unroll
  for (T& value : registers) {
    if constexpr (sizeof(T) == sizeof(int) && T(0.5f) == T(0)) {
      asm volatile("" : "+r"(value)::"memory");
    } else {
      asm volatile("" : "+f"(value)::"memory");
    }
  }
}
__device__ __forceinline__ void keep(float*& pointer) { asm volatile("" : "+l"(pointer)::"memory"); }

// B operand of wgmma: rows of 64 16-bit numbers along the inputs (128 bytes, swizzled by 128), 8 rows every 1024 bytes.
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* shared) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kStride1024 = uint64_t{1024 >> 4} << 32,
                     kUnused = uint64_t{1} << 16;
  return kSwizzle128 | kStride1024 | kUnused | ((shared_address(shared) & 0x3ffffu) >> 4);
}

// Either operand of a wgmma that takes them transposed: blocks of 64 numbers of a row (128 bytes, swizzled by 128), a
// row for each that is summed over, 8 rows every 1024 bytes; `block_stride` bytes from a block to the next.
__device__ __forceinline__ uint64_t wgmma_descriptor_transposed(const void* shared, int block_stride) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kStride1024 = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kStride1024 | static_cast<uint64_t>(block_stride >> 4) << 16 |
         ((shared_address(shared) & 0x3ffffu) >> 4);
}

// B of a wgmma without swizzle: 8 columns x 16 bytes are contiguous, `k_stride` bytes from the next 16 bytes of inputs
// and `column_stride` bytes from the next 8 columns.
__device__ __forceinline__ uint64_t wgmma_descriptor_unswizzled(const void* shared, int k_stride, int column_stride) {
  return static_cast<uint64_t>(column_stride >> 4) << 32 | static_cast<uint64_t>(k_stride >> 4) << 16 |
         ((shared_address(shared) & 0x3ffffu) >> 4);
}

// d[64 x 8] = a[64 x 32] b[32 x 8] (+ d where `accumulate`) over a warpgroup, in int32: warp w's fragments are those of
// mma.m16n8k32 for rows 16w.. .
__device__ __forceinline__ void wgmma_u8s8(int (&d)[4], const uint4& a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.s32.u8.s8 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, %8, p;\n}\n"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(accumulate));
}

// Shared memory that this thread wrote is what wgmma of others, after a barrier, may read.
__device__ __forceinline__ void fence_shared_for_async() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

}  // namespace wonly::ptx
