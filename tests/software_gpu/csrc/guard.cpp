// What PyTorch asks a device for: its streams and events (DeviceGuardImpl), and its hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "backend.h"

namespace software_gpu {

namespace {

thread_local int64_t the_current_stream = 0;

c10::Device the_device() { return {DEVICE, 0}; }

c10::Stream torch_stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, the_device(), id); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "there is one software GPU per process, found device ", device.index());
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return torch_stream(the_current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return torch_stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return torch_stream(runtime().new_stream().id()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return getNewStream(the_device(), 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return torch_stream(exchange_current_stream(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override { 
    return is_over(runtime().stream(stream.id()).last());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    runtime().host_wait(runtime().stream(stream.id()).last(), "stream.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex) const override { runtime().host_wait_for_all("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator().recordStream(pointer, stream);
  }

  // An event is the mark of its last record. PyTorch asks nothing of an event that was never recorded.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Mark;
    mark(*event) = runtime().stream(stream.id()).record();
  }
  void block(void* event, const c10::Stream& stream) const override {
    runtime().stream(stream.id()).wait_for(mark(event));
  }
  bool queryEvent(void* event) const override { return is_over(mark(event)); }
  void synchronizeEvent(void* event) const override { runtime().host_wait(mark(event), "event.synchronize"); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    return 1e3 * (*mark(end).at_s - *mark(start).at_s);
  }

 private:
  // Where races are checked, the answer does not depend on timing: it is true only if the caller has waited.
  static bool is_over(const Mark& mark) {
    bool is_checked = racecheck().enabled() && mark.happened != nullptr;
    return is_checked ? racecheck().host_is_after(mark.happened) && mark.reached() : mark.reached();
  }
  static Mark& mark(void* event) { return *static_cast<Mark*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return pinned_memory().kind(data, 1) != HostMemory::PAGEABLE; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return the_device(); }
  // Random numbers are the CPU's, so that models are initialized and dropped out as on the CPU accelerator.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

const bool guard_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

Stream& current_stream() { return runtime().stream(the_current_stream); }

int64_t exchange_current_stream(int64_t id) {
  int64_t before = the_current_stream;
  the_current_stream = id;
  return before;
}

}  // namespace software_gpu
