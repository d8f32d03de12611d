// One pass over ranges of sub-groups, by several threads. It is called through ctypes, which releases the GIL.
#include "update.h"

#include <omp.h>
#if defined(__linux__)
#include <sched.h>
#endif
#include <algorithm>
#include <cstring>

namespace {

// The elements of a cache line of 16-bit parameters: no two threads write to the same line.
constexpr std::int64_t kGrain = 32;

// OpenMP keeps the threads that it has started for a calling thread, so each of them is moved once.
void stay_on(std::int32_t core) {
#if defined(__linux__)
  thread_local std::int32_t at = -1;
  if (at == core) return;
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  if (sched_setaffinity(0, sizeof only, &only) == 0) at = core;
#endif
}

Loop loop_of(std::int32_t instruction_set) {
#if defined(HAS_AVX512_BF16)
  if (instruction_set == 3) return update_avx512_bf16;
#endif
#if defined(__x86_64__)
  if (instruction_set == 2) return update_avx512;
  if (instruction_set == 1) return update_avx2;
#endif
  return update_plain;
}

// With fewer elements than this in total, one thread is done before the others are awake. The team is either one thread
// or all of them: libgomp ends the threads that a smaller team does not use, and would have to start them again.
constexpr std::int64_t kWorthWaking = 65536;

// Calls `work(update, begin, end)` on each thread for its share of the elements of all updates, one update after the
// other. For the same lengths a thread always has the same share.
template <typename Work>
void on_threads(const Update* updates, std::int64_t count, const Work& work) {
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < count; ++i) total += updates[i].numel;
  const std::int32_t* const cores = updates[0].cores;
#pragma omp parallel num_threads(total < kWorthWaking ? 1 : updates[0].num_threads)
  {
    const std::int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    if (cores != nullptr) stay_on(cores[thread]);
    const std::int64_t share = (total / threads + kGrain) / kGrain * kGrain;
    std::int64_t before = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t numel = updates[i].numel;
      // The element of this update at which a thread's share ends, in whole grains from the update's first element.
      const auto border = [&](std::int64_t at) {
        return std::clamp<std::int64_t>((at - before + kGrain - 1) / kGrain * kGrain, 0, numel);
      };
      const std::int64_t begin = border(share * thread), end = border(share * (thread + 1));
      if (begin < end) work(updates[i], begin, end);
      before += numel;
    }
  }
}

std::int64_t size_of(std::int32_t dtype) { return dtype == kNone ? 0 : dtype == kFloat32 ? 4 : 2; }

}  // namespace

extern "C" {

// 3: AVX-512 with BF16, 2: AVX-512, 1: AVX2 with FMA and F16C, 0: none of them.
std::int32_t deep_opt_states_instruction_set() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
#if defined(HAS_AVX512_BF16)
    if (__builtin_cpu_supports("avx512bf16")) return 3;
#endif
    return 2;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return 1;
#endif
  return 0;
}

// All `count` updates, at least one, have the same threads and cores.
void deep_opt_states_update(const Update* updates, std::int64_t count, std::int32_t instruction_set) {
  const Loop loop = loop_of(instruction_set);
  on_threads(updates, count, [&](const Update& update, std::int64_t begin, std::int64_t end) {
    const std::int64_t middle = std::clamp(update.cut, begin, end);
    if (begin < middle) loop(update, begin, middle);
    if (middle < end) update_tail(update, middle, end);
  });
}

// Zeros every element on the thread that will update it: the first touch of a page places it near that thread's core.
void deep_opt_states_zero(const Update* update) {
  on_threads(update, 1, [&](const Update& update, std::int64_t begin, std::int64_t end) {
    const auto zero = [&](void* tensor, std::int64_t size) {
      if (tensor != nullptr) std::memset(static_cast<char*>(tensor) + begin * size, 0, (end - begin) * size);
    };
    zero(update.new_master, size_of(update.master_dtype));
    zero(update.new_exp_avg, size_of(update.moment_dtype));
    zero(update.new_exp_avg_sq, size_of(update.moment_dtype));
    zero(const_cast<void*>(update.grad), size_of(update.grad_dtype));
    zero(update.param, size_of(update.param_dtype));
  });
}

}  // extern "C"
