#include "update.h"
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#include "avx512.h"

void update_avx512(const Update& update, std::int64_t begin, std::int64_t end) {
  update_vectors<Avx512>(update, begin, end);
}
#endif
