// The boxed fallback: every operator that the device has no kernel of runs the CPU's kernel on a stream thread.
//
// On the issuing thread, the devices are checked, and the meta kernel gives the shapes of the results, which are
// allocated. The task holds views of the device's memory without references, as a kernel's arguments. The bits are the
// CPU's, because the arithmetic is.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "backend.h"

namespace software_gpu {

namespace {

// The most results of meta kernels that are kept.
constexpr size_t MOST_KNOWN = 10'000;

using c10::IValue;
using c10::OperatorHandle;

// A tensor argument: memory of the device, or a CPU scalar whose value is taken when the operator is issued.
struct TensorArgument {
  std::optional<DeviceView> device;
  at::Tensor value;

  at::Tensor open() const { return device ? device->open() : value; }
};

bool has_tensors(const IValue& value) {
  return value.isTensorList() || (value.isList() && value.toListRef().size() > 0 &&
                                  (value.toListRef()[0].isTensor() || value.toListRef()[0].isNone()));
}

// Copy indices that are in host memory to the device, where PyTorch's kernels for CUDA copy them: the host waits.
void move_indices(const std::string& name, torch::jit::Stack& stack, size_t first) {
  static const std::unordered_set<std::string> indexing = {
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};
  if (indexing.count(name) == 0 || !stack[first].toTensor().device().is_privateuseone()) return;
  c10::List<std::optional<at::Tensor>> indices;
  for (const auto& index : stack[first + 1].toOptionalTensorVector())
    indices.push_back(index && index->defined() ? std::optional(index->to(c10::Device(DEVICE, 0))) : std::nullopt);
  stack[first + 1] = indices;
}

// Return a private copy of a CPU tensor. Numbers of Python stay marked, since they do not take part in type promotion.
at::Tensor by_value(const at::Tensor& tensor) {
  at::Tensor copy = tensor.clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

TensorArgument captured(const at::Tensor& tensor, const c10::FunctionSchema& schema, size_t argument) {
  if (!tensor.defined()) return {std::nullopt, tensor};
  if (tensor.device().type() == DEVICE) return {DeviceView(tensor), {}};
  const auto* alias = schema.arguments()[argument].alias_info();
  bool written = alias != nullptr && alias->isWrite();
  TORCH_CHECK(
      tensor.device().is_cpu() && tensor.dim() == 0 && !written,
      "Expected all tensors to be on the same device, but found at least two devices, ", c10::Device(DEVICE, 0),
      " and ", tensor.device(), "! (when checking argument ", schema.arguments()[argument].name(), " of ",
      schema.name(), ")");
  return {std::nullopt, by_value(tensor)};
}

at::Tensor meta_like(const TensorArgument& argument) {
  if (!argument.device) return argument.value;
  const DeviceView& view = *argument.device;
  return at::empty_strided(view.sizes, view.strides, at::TensorOptions(view.dtype).device(c10::kMeta));
}

at::Tensor device_like(const at::Tensor& meta, at::ScalarType dtype) {
  if (!meta.defined()) return meta;
  return at::empty_strided(meta.sizes(), meta.strides(), at::TensorOptions(dtype).device(DEVICE, 0));
}

// The arguments of one call, with tensors replaced by what a task may hold.
class Arguments {
 public:
  Arguments(const OperatorHandle& op, const torch::jit::Stack& stack) {
    const auto& schema = op.schema();
    size_t count = schema.arguments().size();
    for (size_t i = 0; i < count; ++i) {
      const IValue& value = stack[stack.size() - count + i];
      values_.push_back(value);
      tensors_.emplace_back();
      if (value.isTensor()) {
        tensors_[i].push_back(captured(value.toTensor(), schema, i));
        values_[i] = IValue();
      } else if (has_tensors(value)) {
        for (const IValue& element : value.toListRef())
          tensors_[i].push_back(
              element.isNone() ? TensorArgument{} : captured(element.toTensor(), schema, i));
        is_tensor_list_[i] = value.isTensorList();
        values_[i] = IValue();
      } else if (value.isDevice() && value.toDevice().type() == DEVICE) {
        devices_.insert(i);
      }
    }
  }

  // Return the stack with every tensor given by `make`, and with `device` in place of this one.
  template <class Make>
  torch::jit::Stack stack(c10::Device device, Make make) const {
    torch::jit::Stack result;
    for (size_t i = 0; i < values_.size(); ++i) {
      auto list = is_tensor_list_.find(i);
      if (devices_.count(i)) {
        result.emplace_back(device);
      } else if (list != is_tensor_list_.end()) {
        result.push_back(rebuilt_list(list->second, tensors_[i], make));
      } else if (tensors_[i].size() == 1) {
        result.emplace_back(make(tensors_[i][0]));
      } else {
        result.push_back(values_[i]);
      }
    }
    return result;
  }

  torch::jit::Stack meta_stack() const { return stack(c10::kMeta, meta_like); }
  torch::jit::Stack open_stack() const {
    return stack(c10::kCPU, [](const TensorArgument& argument) { return argument.open(); });
  }

  double bytes() const {
    double total = 0;
    for (auto& tensors : tensors_)
      for (auto& tensor : tensors)
        if (tensor.device) total += tensor.device->bytes();
    return total;
  }
  std::vector<Bytes> ranges(const c10::FunctionSchema& schema) const {
    std::vector<Bytes> result;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      for (auto& tensor : tensors_[i])
        if (tensor.device) result.push_back(tensor.device->range(alias != nullptr && alias->isWrite()));
    }
    return result;
  }
  // Return a text that determines the results of the meta kernel, or none if they may depend on more than it has.
  std::optional<std::string> signature() const {
    std::ostringstream text;
    text << c10::get_default_dtype();
    for (size_t i = 0; i < values_.size(); ++i) {
      text << (is_tensor_list_.count(i) ? "[" : ";");
      for (auto& tensor : tensors_[i]) {
        if (tensor.device) {
          text << tensor.device->dtype << tensor.device->sizes << tensor.device->strides;
        } else if (tensor.value.defined()) {
          if (!tensor.value.unsafeGetTensorImpl()->is_wrapped_number()) return std::nullopt;
          text << "number" << tensor.value.scalar_type() << tensor.value.item();
        }
        text << ",";
      }
      const IValue& value = values_[i];
      if (!tensors_[i].empty() || value.isNone()) continue;
      bool is_plain = value.isScalar() || value.isString() || value.isDevice() || value.isIntList() ||
                      value.isDoubleList() || value.isBoolList();
      if (!is_plain) return std::nullopt;
      text << value.tagKind() << value;
    }
    return text.str();
  }
  const DeviceView* view(size_t i) const {
    return i < tensors_.size() && tensors_[i].size() == 1 && tensors_[i][0].device ? &*tensors_[i][0].device : nullptr;
  }
  bool has_mask() const {
    for (auto& tensors : tensors_)
      for (auto& tensor : tensors)
        if (tensor.device && tensor.device->dtype == at::kBool) return true;
    return false;
  }
  void update_view(size_t i, const at::Tensor& tensor) { tensors_[i][0] = {DeviceView(tensor), {}}; }

 private:
  template <class Make>
  static IValue rebuilt_list(bool is_tensor_list, const std::vector<TensorArgument>& elements, Make make) {
    if (is_tensor_list) {
      c10::List<at::Tensor> list;
      for (auto& element : elements) list.push_back(make(element));
      return list;
    }
    c10::List<std::optional<at::Tensor>> list;
    for (auto& element : elements) {
      at::Tensor tensor = make(element);
      list.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
    }
    return list;
  }

  torch::jit::Stack values_;
  std::vector<std::vector<TensorArgument>> tensors_;
  // The arguments that are lists: of tensors, or of tensors that may be missing.
  std::map<size_t, bool> is_tensor_list_;
  std::set<size_t> devices_;
};

// Call the kernel of the arguments' device, below autograd, autocast and Python modes.
void call_kernel(const OperatorHandle& op, torch::jit::Stack& stack) {
  static const c10::DispatchKeySet excluded =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
  c10::impl::ExcludeDispatchKeyGuard guard(excluded);
  op.callBoxed(stack);
}

// Return the position of the argument that the i-th result is, or none if it is a new tensor.
std::optional<size_t> aliased_argument(const c10::FunctionSchema& schema, size_t i) {
  const auto* alias = schema.returns()[i].alias_info();
  if (alias == nullptr) return std::nullopt;
  TORCH_CHECK(alias->isWrite(), schema.name(), " returns a view: the software GPU needs a kernel of its own for it");
  for (size_t j = 0; j < schema.arguments().size(); ++j) {
    const auto* other = schema.arguments()[j].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) return j;
  }
  TORCH_CHECK(false, schema.name(), ": no argument is its result ", i);
}

// A few meta kernels give the dtypes of CUDA for the statistics of a norm, where the CPU has those of its parameters.
at::ScalarType cpu_dtype(const std::string& name, size_t result, const at::Tensor& meta, const Arguments& arguments) {
  static const std::map<std::string, std::vector<size_t>> parameters_first = {
      {"aten::native_layer_norm", {2, 0}}, {"aten::native_batch_norm", {1, 2, 3, 4, 0}}};
  auto found = parameters_first.find(name);
  if (found == parameters_first.end() || result == 0) return meta.scalar_type();
  for (size_t argument : found->second)
    if (const DeviceView* view = arguments.view(argument)) return view->dtype;
  return meta.scalar_type();
}

double flops_of(const std::string& name, const Arguments& arguments, const torch::jit::Stack& results) {
  static const std::map<std::string, size_t> inner = {
      {"aten::mm", 0}, {"aten::bmm", 0}, {"aten::mv", 0}, {"aten::addmm", 1}, {"aten::baddbmm", 1}, {"aten::addmv", 1}};
  auto found = inner.find(name);
  if (found == inner.end() || results.empty() || !results[0].isTensor()) return 0;
  const DeviceView* factor = arguments.view(found->second);
  return factor == nullptr ? 0 : 2.0 * results[0].toTensor().numel() * factor->sizes.back();
}

bool draws_random_numbers(const OperatorHandle& op) {
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return true;
  for (const auto& argument : op.schema().arguments())
    if (argument.name() == "generator") return true;
  return false;
}

void store(const DeviceView& to, const at::Tensor& result, const std::string& name) {
  TORCH_CHECK(
      result.sizes() == to.sizes && result.scalar_type() == to.dtype, name, ": the CPU's kernel gave ", result.sizes(),
      " of ", result.scalar_type(), ", its meta kernel ", c10::IntArrayRef(to.sizes), " of ", to.dtype);
  to.open().copy_(result);
}

// Return whether the operator fills its first argument, and reads no other tensor.
bool fills_self(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  const auto* alias = arguments[0].alias_info();
  return schema.returns().size() == 1 && !arguments[0].is_out() && alias != nullptr && alias->isWrite() &&
         std::none_of(arguments.begin() + 1, arguments.end(), [](const auto& argument) {
           return argument.type()->isSubtypeOf(*c10::TensorType::get());
         });
}

// Fill a tensor with random numbers in the order in which the calls are issued, as the CPU does.
void fill_with_random_numbers(const OperatorHandle& op, torch::jit::Stack& stack, size_t first) {
  at::Tensor self = stack[first].toTensor();
  // The CPU draws in the order of the strides.
  at::Tensor drawn = at::empty_strided(self.sizes(), self.strides(), self.options().device(c10::kCPU));
  torch::jit::Stack on_host(stack.begin() + first, stack.end());
  on_host[0] = drawn;
  call_kernel(op, on_host);
  DeviceView to(self);
  enqueue_kernel(op.schema().name(), [to, drawn] { to.open().copy_(drawn); }, {to.range(true)}, to.bytes());
  stack.resize(first);
  stack.emplace_back(self);
}

// Let the host wait for the kernel, whose results have shapes or values that only the data determine.
void run_and_wait(const OperatorHandle& op, torch::jit::Stack& stack, size_t first, const Arguments& arguments) {
  torch::jit::Stack results;
  const auto& schema = op.schema();
  std::string error;
  enqueue_kernel(
      schema.name(),
      [&] {
        try {
          results = arguments.open_stack();
          // The kernel gives an argument for its result the size, which memory of the device does not allow.
          for (size_t i = 0; i < results.size(); ++i)
            if (schema.arguments()[i].is_out())
              results[i] = at::empty({0}, at::TensorOptions(results[i].toTensor().scalar_type()));
          call_kernel(op, results);
        } catch (const std::exception& raised) {
          error = raised.what();
        }
      },
      arguments.ranges(schema), arguments.bytes());
  runtime().host_wait(current_stream().last(), schema.name());
  TORCH_CHECK(error.empty(), error);
  auto copy_to = [&](const at::Tensor& tensor, const at::Tensor& result) {
    DeviceView to(tensor);
    enqueue_kernel(schema.name(), [to, result] { to.open().copy_(result); }, {to.range(true)}, to.bytes());
    return tensor;
  };
  auto on_device = [&](const at::Tensor& result) {
    if (!result.defined()) return result;
    return copy_to(at::empty_strided(result.sizes(), result.strides(), result.options().device(DEVICE, 0)), result);
  };
  torch::jit::Stack returned;
  for (size_t i = 0; i < results.size(); ++i) {
    if (auto alias = aliased_argument(schema, i)) {
      at::Tensor argument = stack[first + *alias].toTensor();
      if (schema.arguments()[*alias].is_out())
        copy_to(argument.resize_(results[i].toTensor().sizes()), results[i].toTensor());
      returned.emplace_back(argument);
    } else if (results[i].isTensor()) {
      returned.push_back(on_device(results[i].toTensor()));
    } else if (results[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : results[i].toTensorVector()) list.push_back(on_device(tensor));
      returned.emplace_back(list);
    } else {
      returned.push_back(results[i]);
    }
  }
  stack.resize(first);
  stack.insert(stack.end(), returned.begin(), returned.end());
}

// Return the results of the meta kernel, or none if there is no such kernel, or if the results depend on data.
std::optional<torch::jit::Stack> meta_results(const OperatorHandle& op, const Arguments& arguments) {
  const std::string& name = op.schema().name();
  // A mask selects as many elements as it has ones. The meta kernel would raise that, which takes milliseconds.
  if (name == "aten::index" && arguments.has_mask()) return std::nullopt;
  // These meta kernels give the shapes of CUDA, where the CPU's kernels give others.
  static const std::unordered_set<std::string> as_on_cuda = {"aten::_embedding_bag", "aten::_embedding_bag_forward_only"};
  if (as_on_cuda.count(name)) return std::nullopt;
  static std::mutex mutex;
  // Many meta kernels are in Python and take a hundred times as long as a launch on CUDA, so results are kept.
  static auto* known = new std::unordered_map<std::string, torch::jit::Stack>;
  auto key = arguments.signature();
  if (key) {
    *key = toString(op.operator_name()) + *key;
    std::lock_guard lock(mutex);
    if (auto found = known->find(*key); found != known->end()) return found->second;
  }
  torch::jit::Stack stack = arguments.meta_stack();
  try {
    call_kernel(op, stack);
    if (key) {
      // Destroyed after the lock is released: the tensors of a meta kernel in Python may need the GIL for that.
      std::unordered_map<std::string, torch::jit::Stack> discarded;
      std::lock_guard lock(mutex);
      if (known->size() == MOST_KNOWN) known->swap(discarded);
      known->emplace(*key, stack);
    }
    return stack;
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  } catch (const pybind11::error_already_set& error) {
    // This is what a meta kernel in Python raises if its results depend on data.
    pybind11::gil_scoped_acquire gil;
    if (!error.matches(PyExc_NotImplementedError)) throw;
    return std::nullopt;
  }
}

// Give an `out=` argument the size that the operator gives it.
void resize_outputs(
    const OperatorHandle& op, const torch::jit::Stack& stack, size_t first, Arguments& arguments,
    const torch::jit::Stack& meta) {
  const auto& schema = op.schema();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto alias = aliased_argument(schema, i);
    if (!alias || !schema.arguments()[*alias].is_out() || !meta[i].isTensor()) continue;
    const at::Tensor& out = stack[first + *alias].toTensor();
    if (out.sizes() == meta[i].toTensor().sizes()) continue;
    out.resize_(meta[i].toTensor().sizes());
    arguments.update_view(*alias, out);
  }
}

void fallback(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t first = stack->size() - schema.arguments().size();
  move_indices(schema.name(), *stack, first);
  Arguments arguments(op, *stack);
  if (draws_random_numbers(op)) {
    fills_self(schema) ? fill_with_random_numbers(op, *stack, first) : run_and_wait(op, *stack, first, arguments);
    return;
  }
  auto meta = meta_results(op, arguments);
  bool only_tensors = meta && std::all_of(meta->begin(), meta->end(), [](const IValue& value) {
    return value.isTensor() || value.isTensorList();
  });
  if (!only_tensors) {
    run_and_wait(op, *stack, first, arguments);
    return;
  }
  resize_outputs(op, *stack, first, arguments, *meta);
  torch::jit::Stack returned;
  std::vector<std::vector<std::optional<DeviceView>>> outputs;
  auto allocate = [&](const at::Tensor& like, size_t result) {
    if (!like.defined()) {
      outputs.back().push_back(std::nullopt);
      return at::Tensor();
    }
    at::Tensor tensor = device_like(like, cpu_dtype(schema.name(), result, like, arguments));
    outputs.back().push_back(DeviceView(tensor));
    return tensor;
  };
  for (size_t i = 0; i < meta->size(); ++i) {
    outputs.emplace_back();
    if (auto alias = aliased_argument(schema, i)) {
      returned.push_back((*stack)[first + *alias]);
    } else if ((*meta)[i].isTensor()) {
      returned.emplace_back(allocate((*meta)[i].toTensor(), i));
    } else {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : (*meta)[i].toTensorVector()) list.push_back(allocate(tensor, i));
      returned.emplace_back(list);
    }
  }
  double bytes = arguments.bytes();
  std::vector<Bytes> ranges = arguments.ranges(schema);
  for (auto& output : outputs)
    for (auto& view : output)
      if (view) {
        bytes += view->bytes();
        ranges.push_back(view->range(true));
      }
  double flops = flops_of(schema.name(), arguments, returned);
  auto work = [op, arguments = std::move(arguments), outputs = std::move(outputs)] {
    torch::jit::Stack results = arguments.open_stack();
    call_kernel(op, results);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].empty()) continue;
      auto tensors = results[i].isTensor() ? std::vector{results[i].toTensor()} : results[i].toTensorVector();
      for (size_t j = 0; j < tensors.size(); ++j)
        if (outputs[i][j]) store(*outputs[i][j], tensors[j], op.schema().name());
    }
  };
  enqueue_kernel(schema.name(), std::move(work), std::move(ranges), bytes, flops);
  stack->resize(first);
  stack->insert(stack->end(), returned.begin(), returned.end());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// Return whether the operator runs the CPU's kernel, although PyTorch could compose it of other operators, or has an
// extension point for other devices. Composed, it would round differently from the CPU.
bool replaces_composition(const OperatorHandle& op) {
  static const std::unordered_set<std::string> composed_on_the_cpu = {"aten::convolution", "aten::convolution_backward"};
  if (composed_on_the_cpu.count(op.schema().name())) return true;
  using c10::DispatchKey;
  if (!op.hasKernelForDispatchKey(DispatchKey::CPU)) return false;
  for (const auto& result : op.schema().returns())
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return false;
  return op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

void register_operators_of_the_cpu() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) || !replaces_composition(*op)) continue;
    std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    library->impl((name.name + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

const bool operators_registered = (register_operators_of_the_cpu(), true);

}  // namespace

}  // namespace software_gpu
