// PyTorch's view of the memory: the device's caching allocator, and the allocator of page-locked memory.
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include "backend.h"

namespace software_gpu {

namespace {

const c10::Device THE_DEVICE(DEVICE, 0);

class TorchDeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    try {
      void* pointer = device_memory().allocate(size, current_stream());
      return {pointer, pointer, &release, THE_DEVICE};
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "use copy_"); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { device_memory().empty_cache(); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    device_memory().record_stream(pointer.get_context(), runtime().stream(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    return device_memory().statistics();
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { device_memory().reset_peaks(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    size_t total = device_memory().capacity(), reserved = device_memory().statistics().reserved_bytes[0].current;
    // The capacity may have been made smaller than what is in use.
    return {total - std::min(total, reserved), total};
  }

 private:
  static void release(void* pointer) { device_memory().free(pointer); }
};

class TorchPinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* pointer = pinned_memory().allocate(size);
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* destination, const void* source, size_t size) const override {
    default_copy_data(destination, source, size);
  }

 private:
  static void release(void* pointer) { pinned_memory().free(pointer); }
};

TorchDeviceAllocator the_device_allocator;
TorchPinnedAllocator the_pinned_allocator;

REGISTER_ALLOCATOR(DEVICE, &the_device_allocator)

}  // namespace

c10::DeviceAllocator& device_allocator() { return the_device_allocator; }
c10::Allocator& pinned_allocator() { return the_pinned_allocator; }

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  c10::DataPtr fresh = bytes == 0 ? c10::DataPtr(nullptr, THE_DEVICE) : the_device_allocator.allocate(bytes);
  size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    char* destination = device_memory().arena().real(fresh.get());
    char* source = device_memory().arena().real(storage.data());
    auto to = reinterpret_cast<uintptr_t>(fresh.get()), from = reinterpret_cast<uintptr_t>(storage.data());
    enqueue_kernel(
        "resize_", [=] { memcpy(destination, source, kept); }, {{to, to + kept, true}, {from, from + kept, false}},
        2.0 * kept);
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

}  // namespace software_gpu
