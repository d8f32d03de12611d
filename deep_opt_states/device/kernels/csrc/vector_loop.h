// The loop before the cut, for an instruction set described by `V`. Every operation is one correctly rounded IEEE
// operation, in the order of Step_AVX (deepspeed/ops/csrc/includes/cpu_adam.h).
#pragma once
#include "element.h"

namespace {

template <typename V, std::int32_t dtype>
inline typename V::Floats load_vector(const void* from, std::int64_t at) {
  if constexpr (dtype == kFloat32) {
    return V::load(static_cast<const float*>(from) + at);
  } else {
    const auto halves = V::load_halves(static_cast<const std::uint16_t*>(from) + at);
    return dtype == kBFloat16 ? V::from_bfloat16(halves) : V::from_float16(halves);
  }
}

// The tensors that non-temporal stores write. They avoid reading memory that is only written, and need aligned vectors:
// the 16-bit parameters are 2 of 30 bytes, and out of place the states are 12 more.
enum class Stream { kNothing, kHalves, kAll };

template <typename V, Stream stream>
inline void store_state(float* to, typename V::Floats value) {
  stream == Stream::kAll ? V::stream(to, value) : V::store(to, value);
}

template <typename V, std::int32_t dtype, Stream stream>
inline void store_vector(void* to, std::int64_t at, typename V::Floats value) {
  if constexpr (dtype == kFloat32) {
    V::store(static_cast<float*>(to) + at, value);
  } else if constexpr (dtype != kNone) {
    const auto halves = dtype == kBFloat16 ? V::to_bfloat16(value) : V::to_float16(value);
    std::uint16_t* const where = static_cast<std::uint16_t*>(to) + at;
    stream == Stream::kNothing ? V::store_halves(where, halves) : V::stream_halves(where, halves);
  }
}

template <typename V, std::int32_t grad_dtype, std::int32_t param_dtype, std::int32_t decay_kind, Stream stream>
inline void update_full_vectors(const Update& update, std::int64_t begin, std::int64_t end) {
  const Scalars& s = update.scalars;
  const auto grad_scale = V::set(s.grad_scale);
  const auto beta1 = V::set(s.beta1), one_minus_beta1 = V::set(s.one_minus_beta1);
  const auto beta2 = V::set(s.beta2), one_minus_beta2 = V::set(s.one_minus_beta2);
  const auto bias_correction2 = V::set(s.bias_correction2), eps = V::set(s.eps);
  const auto step_size = V::set(s.step_size), decay = V::set(s.decay);
  for (std::int64_t at = begin; at < end; at += V::width) {
    auto grad = V::multiply(load_vector<V, grad_dtype>(update.grad, at), grad_scale);
    auto exp_avg_sq = V::load(update.exp_avg_sq + at);
    auto master = V::load(update.master + at);
    if constexpr (decay_kind == kL2) grad = V::multiply_add(master, decay, grad);
    auto exp_avg = V::multiply(V::load(update.exp_avg + at), beta1);
    exp_avg = V::multiply_add(grad, one_minus_beta1, exp_avg);
    exp_avg_sq = V::multiply(exp_avg_sq, beta2);
    exp_avg_sq = V::multiply_add(V::multiply(grad, grad), one_minus_beta2, exp_avg_sq);
    const auto denominator = V::multiply_add(V::square_root(exp_avg_sq), bias_correction2, eps);
    if constexpr (decay_kind == kDecoupled) master = V::multiply_add(master, decay, master);
    master = V::multiply_add(V::divide(exp_avg, denominator), step_size, master);
    store_state<V, stream>(update.new_exp_avg + at, exp_avg);
    store_state<V, stream>(update.new_master + at, master);
    store_vector<V, param_dtype, stream>(update.param, at, master);
    store_state<V, stream>(update.new_exp_avg_sq + at, exp_avg_sq);
  }
}

inline bool is_aligned(const void* address, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
}

template <typename V>
inline bool can_stream_halves(const Update& update, std::int64_t begin) {
  return is_aligned(static_cast<std::uint16_t*>(update.param) + begin, sizeof(typename V::Halves));
}

template <typename V>
inline bool can_stream_states(const Update& update, std::int64_t begin) {
  constexpr std::size_t bytes = sizeof(typename V::Floats);
  return update.new_master != update.master && is_aligned(update.new_master + begin, bytes) &&
         is_aligned(update.new_exp_avg + begin, bytes) && is_aligned(update.new_exp_avg_sq + begin, bytes);
}

template <typename V>
inline void update_vectors(const Update& update, std::int64_t begin, std::int64_t end) {
  const std::int64_t whole = begin + (end - begin) / V::width * V::width;
  with_dtypes(update, [&](auto grad_dtype, auto param_dtype) {
    constexpr std::int32_t grad = decltype(grad_dtype)::value, param = decltype(param_dtype)::value;
    const auto run = [&](auto decay_kind, auto stream) {
      update_full_vectors<V, grad, param, decltype(decay_kind)::value, decltype(stream)::value>(update, begin, whole);
    };
    const auto with_stream = [&](auto decay_kind) {
      if constexpr (param == kBFloat16 || param == kFloat16) {
        if (can_stream_halves<V>(update, begin)) {
          if (can_stream_states<V>(update, begin)) {
            return run(decay_kind, std::integral_constant<Stream, Stream::kAll>{});
          }
          return run(decay_kind, std::integral_constant<Stream, Stream::kHalves>{});
        }
      }
      run(decay_kind, std::integral_constant<Stream, Stream::kNothing>{});
    };
    switch (update.scalars.decay_kind) {
      case kNoDecay: with_stream(std::integral_constant<std::int32_t, kNoDecay>{}); break;
      case kDecoupled: with_stream(std::integral_constant<std::int32_t, kDecoupled>{}); break;
      case kL2: with_stream(std::integral_constant<std::int32_t, kL2>{}); break;
    }
    for (std::int64_t at = whole; at < end; ++at) update_element<kGradientFused, grad, param>(update, at);
  });
  // Non-temporal stores become visible to other cores, and to a copy engine, in any order without this.
  _mm_sfence();
}

}  // namespace
