// The update of one element, and the conversions of its 16-bit types. Everything has internal linkage: each translation
// unit is compiled for another instruction set, and the linker must not merge their copies.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>
#include "update.h"

namespace {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float from_bfloat16(std::uint16_t half) { return float_of(std::uint32_t(half) << 16); }

// Rounds to nearest, ties to even, and keeps denormals, as PyTorch does (c10/util/BFloat16.h), unlike vcvtneps2bf16.
inline std::uint16_t to_bfloat16(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return std::uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_float16(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t(half & 0x8000u) << 16;
  const std::uint32_t rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  // A denormal of fp16 is a multiple of 2^-24; so is every fp16 number, but this is exact for denormals only.
  if (rest < 0x400u) return float_of(sign | bits_of(float(rest) * 0x1p-24f));
  return float_of(sign | ((rest << 13) + 0x38000000u));
}

// Rounds to nearest, ties to even (IEEE 754), as PyTorch and the processor's vcvtps2ph do.
inline std::uint16_t to_float16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint16_t sign = std::uint16_t((bits >> 16) & 0x8000u);
  const std::uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return std::uint16_t(sign | 0x7e00u | ((rest >> 13) & 0x1ffu));
  if (rest >= 0x477ff000u) return std::uint16_t(sign | 0x7c00u);  // rounds to 65520 or more: infinity
  if (rest < 0x38800000u) {
    // A denormal: adding 0.5 rounds to a multiple of 2^-24, the value of its last bit.
    return std::uint16_t(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000u));
  }
  return std::uint16_t(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

template <std::int32_t dtype>
inline float load(const void* from, std::int64_t at) {
  if constexpr (dtype == kFloat32) return static_cast<const float*>(from)[at];
  if constexpr (dtype == kBFloat16) return from_bfloat16(static_cast<const std::uint16_t*>(from)[at]);
  if constexpr (dtype == kFloat16) return from_float16(static_cast<const std::uint16_t*>(from)[at]);
}

template <std::int32_t dtype>
inline void store(void* to, std::int64_t at, float value) {
  if constexpr (dtype == kFloat32) static_cast<float*>(to)[at] = value;
  if constexpr (dtype == kBFloat16) static_cast<std::uint16_t*>(to)[at] = to_bfloat16(value);
  if constexpr (dtype == kFloat16) static_cast<std::uint16_t*>(to)[at] = to_float16(value);
}

// a * b + c
template <bool fused>
inline float multiply_add(float a, float b, float c) {
  if constexpr (fused) return std::fma(a, b, c);
  const float product = a * b;
  return product + c;
}

// The dtypes of the tensors of an update.
template <std::int32_t master_, std::int32_t moment_, std::int32_t grad_, std::int32_t param_>
struct Dtypes {
  static constexpr std::int32_t master = master_, moment = moment_, grad = grad_, param = param_;
};

// Stock converts the gradient to the dtype of the master weights, and then scales it in place.
template <typename D>
inline float scaled_gradient(const Update& update, std::int64_t at) {
  const float grad = load<D::grad>(update.grad, at);
  if constexpr (D::master == kFloat32) return grad * update.scalars.grad_scale;
  return from_bfloat16(to_bfloat16(from_bfloat16(to_bfloat16(grad)) * update.scalars.grad_scale));
}

// deepspeed/ops/csrc/includes/cpu_adam.h, Step_AVX (kGradientFused), and cpu_adam_impl.cpp, Step_1.
template <std::int32_t tail, typename D>
inline void update_element(const Update& update, std::int64_t at) {
  constexpr bool fused = tail != kUnfused;
  const Scalars& s = update.scalars;
  float grad = scaled_gradient<D>(update, at);
  float exp_avg = load<D::moment>(update.exp_avg, at);
  float exp_avg_sq = load<D::moment>(update.exp_avg_sq, at);
  float master = load<D::master>(update.master, at);
  if (s.decay_kind == kL2) grad = multiply_add<fused>(master, s.decay, grad);
  if constexpr (tail == kMomentFused) {
    exp_avg = std::fma(exp_avg, s.beta1, grad * s.one_minus_beta1);
    exp_avg_sq = std::fma(exp_avg_sq, s.beta2, grad * grad * s.one_minus_beta2);
  } else {
    exp_avg = multiply_add<fused>(grad, s.one_minus_beta1, exp_avg * s.beta1);
    exp_avg_sq = multiply_add<fused>(grad * grad, s.one_minus_beta2, exp_avg_sq * s.beta2);
  }
  const float denominator = multiply_add<fused>(std::sqrt(exp_avg_sq), s.bias_correction2, s.eps);
  if (s.decay_kind == kDecoupled) master = multiply_add<fused>(master, s.decay, master);
  master = multiply_add<fused>(exp_avg / denominator, s.step_size, master);
  store<D::moment>(update.new_exp_avg, at, exp_avg);
  if constexpr (D::param != kNone) store<D::param>(update.param, at, master);
  store<D::master>(update.new_master, at, master);
  store<D::moment>(update.new_exp_avg_sq, at, exp_avg_sq);
}

template <std::int32_t dtype>
using Constant = std::integral_constant<std::int32_t, dtype>;

// Calls `body` with the dtypes as compile-time constants. A model with bf16 master weights is in bf16.
template <typename Body>
inline void with_dtypes(const Update& update, const Body& body) {
  const auto with_states = [&](auto grad, auto param) {
    constexpr std::int32_t g = decltype(grad)::value, p = decltype(param)::value;
    if (update.master_dtype == kFloat32) return body(Dtypes<kFloat32, kFloat32, g, p>{});
    if constexpr (g != kFloat16 && (p == kNone || p == kBFloat16)) {
      if (update.moment_dtype == kFloat32) return body(Dtypes<kBFloat16, kFloat32, g, p>{});
      return body(Dtypes<kBFloat16, kBFloat16, g, p>{});
    }
  };
  const auto with_param = [&](auto grad) {
    switch (update.param_dtype) {
      case kNone: return with_states(grad, Constant<kNone>{});
      case kFloat32: return with_states(grad, Constant<kFloat32>{});
      case kBFloat16: return with_states(grad, Constant<kBFloat16>{});
      case kFloat16: return with_states(grad, Constant<kFloat16>{});
    }
  };
  switch (update.grad_dtype) {
    case kFloat32: return with_param(Constant<kFloat32>{});
    case kBFloat16: return with_param(Constant<kBFloat16>{});
    case kFloat16: return with_param(Constant<kFloat16>{});
  }
}

}  // namespace
