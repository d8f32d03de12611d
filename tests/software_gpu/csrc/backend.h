// What the files of the torch layer share: the current stream, and tensors of the device as stream threads see them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <vector>

#include "memory.h"
#include "stream.h"

namespace software_gpu {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;

// The stream on which the calling thread issues work.
Stream& current_stream();
int64_t exchange_current_stream(int64_t id);

c10::DeviceAllocator& device_allocator();
c10::Allocator& pinned_allocator();

// A tensor's memory on the device, without a reference to it, as the arguments of a kernel are. A task that holds one
// reads whatever is in that memory when it is executed.
struct DeviceView {
  void* pointer = nullptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::ScalarType::Float;

  DeviceView() = default;
  explicit DeviceView(const at::Tensor& tensor);
  int64_t bytes() const;
  // Return a CPU tensor over that memory. Only stream threads may use it.
  at::Tensor open() const;
  // The bytes from the first to the last element, with the access of an operation.
  Bytes range(bool writes) const;
};

// Enqueue a kernel on the current stream. Without `flops`, its duration follows from the bytes that it moves.
void enqueue_kernel(
    std::string name, std::function<void()> work, std::vector<Bytes> ranges, double bytes, double flops = 0);

void resize_storage(c10::StorageImpl& storage, size_t bytes);

}  // namespace software_gpu
