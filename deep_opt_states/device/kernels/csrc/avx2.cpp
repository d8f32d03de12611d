#include "update.h"
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>
#include "vector_loop.h"

namespace {

struct Avx2 {
  using Floats = __m256;
  using Halves = __m128i;
  static constexpr std::int64_t width = 8;

  static Floats set(float value) { return _mm256_set1_ps(value); }
  static Floats load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
  static void stream(float* to, Floats value) { _mm256_stream_ps(to, value); }
  static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  static Floats square_root(Floats a) { return _mm256_sqrt_ps(a); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

  static Halves load_halves(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
  static void store_halves(void* to, Halves value) { _mm_storeu_si128(static_cast<__m128i*>(to), value); }
  static void stream_halves(void* to, Halves value) { _mm_stream_si128(static_cast<__m128i*>(to), value); }
  static Floats from_float16(Halves value) { return _mm256_cvtph_ps(value); }
  static Halves to_float16(Floats value) { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }
  static Floats from_bfloat16(Halves value) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(value), 16));
  }
  static Halves to_bfloat16(Floats value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i halves = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7fc0), is_nan);
    return packed(halves);
  }

 private:
  static Halves packed(__m256i halves) {
    return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  }
};

}  // namespace

void update_avx2(const Update& update, std::int64_t begin, std::int64_t end) {
  update_vectors<Avx2>(update, begin, end);
}
#endif
