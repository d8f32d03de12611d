#include "update.h"
#if defined(HAS_AVX512_BF16)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#include "avx512.h"

namespace {

struct Avx512Bf16 : Avx512 {
  // vcvtneps2bf16 rounds to nearest, ties to even, but flushes denormals and keeps the payload of a NaN.
  static Halves to_bfloat16(Floats value) {
    constexpr int denormal_or_nan = 0x20 | 0x80 | 0x01;
    if (__builtin_expect(_mm512_fpclass_ps_mask(value, denormal_or_nan) != 0, 0)) return Avx512::to_bfloat16(value);
    return Halves(_mm512_cvtneps_pbh(value));
  }
};

}  // namespace

void update_avx512_bf16(const Update& update, std::int64_t begin, std::int64_t end) {
  update_vectors<Avx512Bf16>(update, begin, end);
}
#endif
