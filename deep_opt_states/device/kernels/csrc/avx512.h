// The vectors of AVX-512. A source file selects its instruction set before it includes this.
#pragma once
#include <immintrin.h>
#include "vector_loop.h"

namespace {

struct Avx512 {
  using Floats = __m512;
  using Halves = __m256i;
  static constexpr std::int64_t width = 16;

  static Floats set(float value) { return _mm512_set1_ps(value); }
  static Floats load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
  static void stream(float* to, Floats value) { _mm512_stream_ps(to, value); }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats square_root(Floats a) { return _mm512_sqrt_ps(a); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

  static Halves load_halves(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  static void store_halves(void* to, Halves value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }
  static void stream_halves(void* to, Halves value) { _mm256_stream_si256(static_cast<__m256i*>(to), value); }
  static Floats from_float16(Halves value) { return _mm512_cvtph_ps(value); }
  static Halves to_float16(Floats value) { return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }
  // One permutation moves the halves of 32-bit words, instead of an extension or truncation and a shift.
  static Floats from_bfloat16(Halves value) {
    const __m512i high = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0,
                                          3, 0, 2, 0, 1, 0, 0, 0);
    return _mm512_castsi512_ps(
        _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, high, _mm512_castsi256_si512(value)));
  }
  static Halves to_bfloat16(Floats value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __m512i down = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_mask_add_epi32(down, is_odd, down, _mm512_set1_epi32(1));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i odd = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 31, 29, 27, 25, 23,
                                         21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_castsi512_si256(_mm512_permutexvar_epi16(
        odd, _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000))));
  }
};

}  // namespace
