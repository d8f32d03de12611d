// Copies with CUDA's rules (cf. aten/src/ATen/native/cuda/Copy.cu and the CUDA runtime's "API synchronization behavior").
//
// A copy between host and device is asynchronous only with page-locked memory. From pageable memory, small copies are
// staged and return; larger ones block the host, and so do all copies to pageable memory.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "backend.h"

namespace software_gpu {

namespace {

constexpr int64_t STAGED_BYTES = 64 * 1024;
constexpr int STAGING_TRAFFIC = 3;  // a pageable byte is read, written to page-locked memory, and read again

Cost copy_cost(double bytes, bool to_device, bool page_locked) {
  Cost cost;
  cost.latency_s = runtime().settings().copy_latency_s;
  cost.amounts[to_device ? H2D : D2H] = bytes;
  cost.amounts[BOTH_DIRECTIONS] = bytes;
  cost.amounts[HOST_MEMORY] = page_locked ? bytes : STAGING_TRAFFIC * bytes;
  if (!page_locked) cost.amounts[PAGEABLE] = bytes;
  return cost;
}

// Copy contiguous memory of equal dtypes between host and device.
void copy_bytes(const at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  size_t bytes = destination.nbytes();
  bool to_device = destination.device().type() == DEVICE;
  Stream& stream = current_stream();
  void* host = (to_device ? source : destination).data_ptr();
  char* device = device_memory().arena().real((to_device ? destination : source).data_ptr());
  HostMemory kind = pinned_memory().kind(host, bytes);
  bool page_locked = kind != HostMemory::PAGEABLE;
  bool staged = to_device && !page_locked && bytes <= STAGED_BYTES;
  std::function<void()> work;
  if (staged) {
    auto bytes_begin = static_cast<char*>(host);
    auto staging = std::make_shared<std::vector<char>>(bytes_begin, bytes_begin + bytes);
    work = [=] { memcpy(device, staging->data(), bytes); };
  } else {
    work = [=] {
      // CUDA leaves undefined what a copy does whose memory has been unregistered.
      if (kind == HostMemory::REGISTERED && pinned_memory().kind(host, bytes) != HostMemory::REGISTERED)
        throw std::runtime_error("memory was unregistered while a copy from or to it was in flight");
      to_device ? memcpy(device, host, bytes) : memcpy(host, device, bytes);
    };
  }
  std::string name = to_device ? "copy H2D" : "copy D2H";
  Engine engine = to_device ? Engine::H2D : Engine::D2H;
  Task task{work, page_locked ? name : name + ", pageable", engine, copy_cost(bytes, to_device, page_locked)};
  auto on_device = reinterpret_cast<uintptr_t>((to_device ? destination : source).data_ptr());
  auto on_host = reinterpret_cast<uintptr_t>(host);
  task.ranges.push_back({on_device, on_device + bytes, to_device});
  // The race check knows page-locked memory only.
  if (page_locked) task.ranges.push_back({on_host, on_host + bytes, !to_device});
  Mark copied = stream.enqueue(std::move(task));
  if (kind == HostMemory::PINNED) pinned_memory().record_use(host, copied);
  if (!non_blocking) {
    runtime().host_wait(copied, name + ", blocking");
  } else if (!page_locked && !staged) {
    runtime().host_wait(copied, name + ", pageable", /*promised=*/false);
  }
}

void copy_between(const at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  // A blocking copy converts on the host, a non-blocking one on the device.
  bool converts_at_source = source.device().type() == (non_blocking ? DEVICE : c10::DeviceType::CPU);
  bool same = destination.scalar_type() == source.scalar_type();
  at::Tensor from = source.expand_as(destination), to = destination;
  auto contiguous = at::MemoryFormat::Contiguous;
  if (converts_at_source) {
    if (!to.is_contiguous()) to = at::empty_like(to, to.options(), contiguous);
    from = from.to(to.scalar_type()).contiguous();
  } else {
    if (!to.is_contiguous() || !same) to = at::empty_like(to, to.options().dtype(from.scalar_type()), contiguous);
    from = from.contiguous();
  }
  // Host memory that was allocated here is pageable, so the bytes are there when this returns.
  copy_bytes(to, from, non_blocking);
  if (!to.is_same(destination)) destination.copy_(to, non_blocking);
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  for (const at::Tensor& tensor : {self, source})
    TORCH_CHECK(
        tensor.device().type() == DEVICE || tensor.device().is_cpu(), "cannot copy from or to ", tensor.device());
  if (self.device() != source.device()) {
    copy_between(self, source, non_blocking);
    return self;
  }
  DeviceView to(self), from(source.expand_as(self));
  enqueue_kernel("copy", [=] { to.open().copy_(from.open()); }, {to.range(true), from.range(false)},
      to.bytes() + from.bytes());
  return self;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("copy_", &copy); }

}  // namespace

}  // namespace software_gpu
