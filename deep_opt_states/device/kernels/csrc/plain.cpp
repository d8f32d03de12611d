// The loops for processors without AVX2, and for the elements after the cut.
#include "element.h"

namespace {

template <std::int32_t tail>
void update_elements(const Update& update, std::int64_t begin, std::int64_t end) {
  with_dtypes(update, [&](auto dtypes) {
    for (std::int64_t at = begin; at < end; ++at) update_element<tail, decltype(dtypes)>(update, at);
  });
}

}  // namespace

void update_plain(const Update& update, std::int64_t begin, std::int64_t end) {
  update_elements<kGradientFused>(update, begin, end);
}

void update_tail(const Update& update, std::int64_t begin, std::int64_t end) {
  switch (update.tail) {
    case kUnfused: return update_elements<kUnfused>(update, begin, end);
    case kGradientFused: return update_elements<kGradientFused>(update, begin, end);
    case kMomentFused: return update_elements<kMomentFused>(update, begin, end);
  }
}
