// Words that host and device share: loads with acquire and stores with release, at system scope.
#pragma once

#include "kernels/floats.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
#else
#include <atomic>
#endif

namespace ringfold {

#if defined(__CUDACC__)
template <class Word>
using SharedWord = cuda::atomic_ref<Word, cuda::thread_scope_system>;
inline constexpr auto kAcquire = cuda::std::memory_order_acquire;
inline constexpr auto kRelease = cuda::std::memory_order_release;
inline constexpr auto kRelaxed = cuda::std::memory_order_relaxed;
#else
template <class Word>
using SharedWord = std::atomic_ref<Word>;
inline constexpr auto kAcquire = std::memory_order_acquire;
inline constexpr auto kRelease = std::memory_order_release;
inline constexpr auto kRelaxed = std::memory_order_relaxed;
#endif

template <class Word>
RINGFOLD_HD Word load_acquire(Word& word) {
  return SharedWord<Word>(word).load(kAcquire);
}
template <class Word>
RINGFOLD_HD Word load_relaxed(Word& word) {
  return SharedWord<Word>(word).load(kRelaxed);
}
template <class Word>
RINGFOLD_HD void store_release(Word& word, Word value) {
  SharedWord<Word>(word).store(value, kRelease);
}

}  // namespace ringfold
