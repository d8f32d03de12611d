// Operators that cannot be the CPU's kernel on another memory: they create, view or resize tensors, or read one number.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "backend.h"

namespace software_gpu {

DeviceView::DeviceView(const at::Tensor& tensor)
    : pointer(tensor.numel() == 0 ? nullptr : tensor.data_ptr()),
      sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()),
      dtype(tensor.scalar_type()) {}

int64_t DeviceView::bytes() const { return c10::multiply_integers(sizes) * c10::elementSize(dtype); }

at::Tensor DeviceView::open() const {
  void* real = pointer == nullptr ? nullptr : device_memory().arena().real(pointer);
  return at::from_blob(real, sizes, strides, at::TensorOptions(dtype));
}

Bytes DeviceView::range(bool writes) const {
  auto begin = reinterpret_cast<uintptr_t>(pointer);
  if (pointer == nullptr) return {begin, begin, writes};
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
  return {begin, begin + (last + 1) * c10::elementSize(dtype), writes};
}

void enqueue_kernel(
    std::string name, std::function<void()> work, std::vector<Bytes> ranges, double bytes, double flops) {
  Settings settings = runtime().settings();
  Cost cost;
  cost.of_model = true;
  cost.latency_s = settings.launch_s;
  cost.amounts[GPU] = flops > 0 ? flops / settings.flops_per_s : bytes / settings.device_bytes_per_s;
  int parts = flops > 0 ? settings.kernels_per_product : 1;
  current_stream().enqueue({std::move(work), std::move(name), Engine::COMPUTE, cost, parts, std::move(ranges)});
}

namespace {

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::get_default_dtype_as_scalartype()));
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional(offset->expect_int()) : std::nullopt);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  size_t bytes = (c10::multiply_integers(sizes) + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) resize_storage(*self.storage().unsafeGetStorageImpl(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  }
  return self;
}

at::Tensor& set_with_offset(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return set_storage(
      self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  int64_t numel = source.nbytes() / self.element_size();
  return set_storage(self, std::move(source), 0, {numel}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  return set_storage(self, empty({0}, self.scalar_type(), {}, {}, {}, {}).storage(), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  DeviceView view(self);
  at::Scalar result;
  enqueue_kernel("item", [&] { result = at::native::_local_scalar_dense_cpu(view.open()); }, {view.range(false)}, view.bytes());
  // The wait ends when the task has, and only then raises errors, so the task may refer to variables of this function.
  runtime().host_wait(current_stream().last(), "item");
  return result;
}

// `param.data = ...` may move a parameter between host and device, as between CPU and CUDA.
bool has_compatible_shallow_copy_type(const at::Tensor&, const at::Tensor&) { return true; }

// Attention is computed from products of matrices and a softmax: the fused kernels exist for some devices only.
int64_t fused_sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

// PyTorch's dropout for accelerators rounds differently from that for the CPU, which is this.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  at::Tensor noise = at::empty_like(input).bernoulli_(1 - p);
  noise.div_(1 - p);
  return input.mul(noise);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("dropout", &dropout); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("dropout", &dropout);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_with_offset);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("record_stream", &record_stream);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
}

}  // namespace

}  // namespace software_gpu
