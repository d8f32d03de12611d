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
// the 16-bit parameters are 2 of 30 bytes if the states are fp32, and out of place the states are 12 more.
enum class Stream { kNothing, kParam, kAll };

template <typename V, std::int32_t dtype, bool streams>
inline void store_vector(void* to, std::int64_t at, typename V::Floats value) {
  if constexpr (dtype == kFloat32) {
    float* const where = static_cast<float*>(to) + at;
    streams ? V::stream(where, value) : V::store(where, value);
  } else if constexpr (dtype != kNone) {
    const auto halves = dtype == kBFloat16 ? V::to_bfloat16(value) : V::to_float16(value);
    std::uint16_t* const where = static_cast<std::uint16_t*>(to) + at;
    streams ? V::stream_halves(where, halves) : V::store_halves(where, halves);
  }
}

template <typename V>
inline typename V::Floats rounded_to_bfloat16(typename V::Floats value) {
  return V::from_bfloat16(V::to_bfloat16(value));
}

template <typename V, typename D>
inline typename V::Floats scaled_vector(const Update& update, std::int64_t at, typename V::Floats grad_scale) {
  const auto grad = load_vector<V, D::grad>(update.grad, at);
  if constexpr (D::master == kFloat32) return V::multiply(grad, grad_scale);
  // Without clipping, rounding changes nothing but the bits of a NaN, and takes a quarter of the time.
  if (D::grad == kBFloat16 && update.scalars.grad_scale == 1.0f) return grad;
  const auto rounded = D::grad == kBFloat16 ? grad : rounded_to_bfloat16<V>(grad);
  return rounded_to_bfloat16<V>(V::multiply(rounded, grad_scale));
}

template <typename V, typename D, std::int32_t decay_kind, Stream stream>
inline void update_full_vectors(const Update& update, std::int64_t begin, std::int64_t end) {
  constexpr bool streams_states = stream == Stream::kAll, streams_param = stream != Stream::kNothing;
  const Scalars& s = update.scalars;
  const auto grad_scale = V::set(s.grad_scale);
  const auto beta1 = V::set(s.beta1), one_minus_beta1 = V::set(s.one_minus_beta1);
  const auto beta2 = V::set(s.beta2), one_minus_beta2 = V::set(s.one_minus_beta2);
  const auto bias_correction2 = V::set(s.bias_correction2), eps = V::set(s.eps);
  const auto step_size = V::set(s.step_size), decay = V::set(s.decay);
  for (std::int64_t at = begin; at < end; at += V::width) {
    auto grad = scaled_vector<V, D>(update, at, grad_scale);
    auto exp_avg_sq = load_vector<V, D::moment>(update.exp_avg_sq, at);
    auto master = load_vector<V, D::master>(update.master, at);
    if constexpr (decay_kind == kL2) grad = V::multiply_add(master, decay, grad);
    auto exp_avg = V::multiply(load_vector<V, D::moment>(update.exp_avg, at), beta1);
    exp_avg = V::multiply_add(grad, one_minus_beta1, exp_avg);
    exp_avg_sq = V::multiply(exp_avg_sq, beta2);
    exp_avg_sq = V::multiply_add(V::multiply(grad, grad), one_minus_beta2, exp_avg_sq);
    const auto denominator = V::multiply_add(V::square_root(exp_avg_sq), bias_correction2, eps);
    if constexpr (decay_kind == kDecoupled) master = V::multiply_add(master, decay, master);
    master = V::multiply_add(V::divide(exp_avg, denominator), step_size, master);
    store_vector<V, D::moment, streams_states>(update.new_exp_avg, at, exp_avg);
    store_vector<V, D::master, streams_states>(update.new_master, at, master);
    store_vector<V, D::param, streams_param>(update.param, at, master);
    store_vector<V, D::moment, streams_states>(update.new_exp_avg_sq, at, exp_avg_sq);
  }
}

// Whether vectors of `dtype` from element `at` on are aligned. A tensor that does not exist is no obstacle.
template <typename V, std::int32_t dtype>
inline bool is_aligned(const void* tensor, std::int64_t at) {
  if constexpr (dtype == kNone) return true;
  constexpr std::int64_t element_bytes = dtype == kFloat32 ? 4 : 2;
  return (reinterpret_cast<std::uintptr_t>(tensor) + at * element_bytes) % (V::width * element_bytes) == 0;
}

template <typename V, typename D>
inline Stream stream_of(const Update& update, std::int64_t begin) {
  if (!is_aligned<V, D::param>(update.param, begin)) return Stream::kNothing;
  const bool streams_states = update.new_master != update.master &&
                              is_aligned<V, D::master>(update.new_master, begin) &&
                              is_aligned<V, D::moment>(update.new_exp_avg, begin) &&
                              is_aligned<V, D::moment>(update.new_exp_avg_sq, begin);
  return streams_states ? Stream::kAll : Stream::kParam;
}

template <typename V>
inline void update_vectors(const Update& update, std::int64_t begin, std::int64_t end) {
  const std::int64_t whole = begin + (end - begin) / V::width * V::width;
  with_dtypes(update, [&](auto dtypes) {
    using D = decltype(dtypes);
    const auto run = [&](auto decay_kind) {
      constexpr std::int32_t kind = decltype(decay_kind)::value;
      switch (stream_of<V, D>(update, begin)) {
        case Stream::kNothing: return update_full_vectors<V, D, kind, Stream::kNothing>(update, begin, whole);
        case Stream::kParam: return update_full_vectors<V, D, kind, Stream::kParam>(update, begin, whole);
        case Stream::kAll: return update_full_vectors<V, D, kind, Stream::kAll>(update, begin, whole);
      }
    };
    switch (update.scalars.decay_kind) {
      case kNoDecay: run(Constant<kNoDecay>{}); break;
      case kDecoupled: run(Constant<kDecoupled>{}); break;
      case kL2: run(Constant<kL2>{}); break;
    }
    for (std::int64_t at = whole; at < end; ++at) update_element<kGradientFused, D>(update, at);
  });
  // Non-temporal stores become visible to other cores, and to a copy engine, in any order without this.
  _mm_sfence();
}

}  // namespace
