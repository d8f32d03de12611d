// The update of a sub-group, or of a range of one, as the Python side describes it (kernels/library.py has the ctypes
// counterpart of this struct).
#pragma once
#include <cstddef>
#include <cstdint>

// The dtypes that tensors can have. Master weights and moments are fp32 or bf16.
enum Dtype : std::int32_t { kNone = 0, kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };

// The ways in which the compiler of stock's op may fuse `m = m * beta1; m = g * (1 - beta1) + m` in its scalar tail.
enum Tail : std::int32_t { kUnfused = 0, kGradientFused = 1, kMomentFused = 2 };

enum Decay : std::int32_t { kNoDecay = 0, kDecoupled = 1, kL2 = 2 };

struct Scalars {
  float grad_scale;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float bias_correction2;  // 1 / sqrt(1 - beta2^t)
  float eps;
  float step_size;  // -lr / (1 - beta1^t)
  float decay;      // kDecoupled (AdamW): -lr * weight_decay; kL2 (Adam): weight_decay
  std::int32_t decay_kind;
};

struct Update {
  Scalars scalars;
  const void* master;
  const void* exp_avg;
  const void* exp_avg_sq;
  void* new_master;  // the same memory as above, or all other memory
  void* new_exp_avg;
  void* new_exp_avg_sq;
  const void* grad;
  void* param;  // written only, may be null
  std::int64_t numel;
  std::int64_t cut;  // elements from here on have the tail's arithmetic; may be outside [0, numel]
  std::int32_t master_dtype, moment_dtype, grad_dtype, param_dtype;
  std::int32_t tail;
  std::int32_t num_threads;
  const std::int32_t* cores;  // one per thread; null leaves the threads where they are
};

// The loop of one instruction set over elements [begin, end), all of them before the cut.
using Loop = void (*)(const Update& update, std::int64_t begin, std::int64_t end);

// GCC 10 is the first with these instructions. Clang claims to be GCC 4.
#if defined(__x86_64__) && __GNUC__ >= 10
#define HAS_AVX512_BF16
#endif

void update_avx512_bf16(const Update& update, std::int64_t begin, std::int64_t end);
void update_avx512(const Update& update, std::int64_t begin, std::int64_t end);
void update_avx2(const Update& update, std::int64_t begin, std::int64_t end);
void update_plain(const Update& update, std::int64_t begin, std::int64_t end);
void update_tail(const Update& update, std::int64_t begin, std::int64_t end);
