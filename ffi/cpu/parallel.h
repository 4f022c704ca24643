// Work sharing on XLA's thread pool that cannot deadlock.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace wonly::cpu {

// Calls body(i) for 0 <= i < count, in any order and on several threads. False if a call ran out of memory.
//
// A handler may itself run on a worker of the pool, and scheduled tasks may start late or never while it runs. So items
// are claimed from a counter; the caller claims too until none is left, and then waits only for items that a running
// task has claimed. A task that starts after that finds no item and touches nothing but the shared counter.
inline bool parallel_for(xla::ffi::ThreadPool& pool, int64_t count, const std::function<void(int64_t)>& body) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<bool> failed{false};
    int64_t count;
    const std::function<void(int64_t)>* body;

    void drain() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        try {
          (*body)(i);
        } catch (const std::bad_alloc&) {
          failed.store(true, std::memory_order_relaxed);
        }
        done.fetch_add(1, std::memory_order_acq_rel);
      }
    }
  };
  if (count <= 0) return true;
  const auto shared = std::make_shared<Shared>();
  shared->count = count;
  shared->body = &body;
  const int64_t helpers = std::min<int64_t>(pool.num_threads() - 1, count - 1);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared] { shared->drain(); });
  shared->drain();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 4096) std::this_thread::yield();
#if defined(__x86_64__)
    else
      _mm_pause();
#endif
  }
  return !shared->failed.load(std::memory_order_relaxed);
}

// A 64-byte aligned buffer of at least `floats` that the calling thread keeps for its next use. Two kinds: what a task
// needs, and what a call shares with its tasks (a caller runs tasks of its own meanwhile).
enum class Buffer { kTask, kCall };

class ThreadBuffer {
 public:
  float* reserve(size_t floats) {
    if (floats > capacity_) {
      release();
      data_ = static_cast<float*>(::operator new(floats * sizeof(float), std::align_val_t{64}));
      capacity_ = floats;
    }
    return data_;
  }
  // Large buffers go back, so that idle threads do not hold them.
  void trim() {
    if (capacity_ * sizeof(float) > kKeepBytes) release();
  }
  ~ThreadBuffer() { release(); }

 private:
  static constexpr size_t kKeepBytes = size_t{16} << 20;
  void release() {
    if (data_ != nullptr) ::operator delete(data_, std::align_val_t{64});
    data_ = nullptr;
    capacity_ = 0;
  }
  float* data_ = nullptr;
  size_t capacity_ = 0;
};

template <Buffer kind>
ThreadBuffer& thread_buffer() {
  static thread_local ThreadBuffer buffer;
  return buffer;
}

}  // namespace wonly::cpu
