#include "racecheck.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <pthread.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <unordered_map>

#include "backend.h"

namespace software_gpu {

namespace {

namespace py = pybind11;

constexpr size_t MOST_RACES = 1000;
constexpr int MOST_CALLERS = 5;

thread_local bool is_stream_thread = false;
thread_local uint64_t lane_session = 0;
thread_local RaceCheck::Lane thread_lane = 0;

// The threads of autograd work while the thread that called `backward` waits for them, so they count as that one.
bool is_autograd_thread() {
  char name[16] = {};
  return pthread_getname_np(pthread_self(), name, sizeof name) == 0 && strncmp(name, "pt_autograd", 11) == 0;
}

std::string thread_name() {
  py::gil_scoped_acquire gil;
  return py::str(py::module_::import("threading").attr("current_thread")().attr("name"));
}

bool is_shown(const std::string& path) {
  for (const char* hidden : {"/torch/", "/contextlib.py", "/unittest/mock.py", "tests/software_gpu/device.py",
                             "tests/software_gpu/process_group.py", "tests/software_gpu/adam_kernel.py",
                             "tests/software_gpu/library.py", "tests/software_gpu/racecheck.py"})
    if (path.find(hidden) != std::string::npos) return false;
  return path[0] != '<';
}

// The bytes from the first to the last element.
Bytes range_of(const at::Tensor& tensor, bool writes) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * tensor.element_size(), writes};
}

// What an operator does to its arguments: nothing if it only makes a view, or is composed of others.
struct Signature {
  bool touches = false;
  std::vector<bool> written;
};

const Signature& signature_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<c10::OperatorName, Signature>;
  std::lock_guard lock(mutex);
  auto [found, is_new] = known->try_emplace(op.operator_name());
  if (!is_new) return found->second;
  Signature& result = found->second;
  const auto& schema = op.schema();
  static const std::set<std::string> without_contents = {
      "aten::_to_copy", "aten::resize_", "aten::set_", "aten::record_stream", "aten::detach_", "aten::pin_memory",
      "aten::empty_like", "aten::new_empty", "aten::new_empty_strided", "aten::_pin_memory", "aten::is_pinned"};
  bool is_composed = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  bool makes_view = std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& returned) {
    return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
  });
  result.touches = !is_composed && !makes_view && without_contents.count(schema.name()) == 0;
  for (const auto& argument : schema.arguments())
    result.written.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  return result;
}

// Record what an operator on host tensors reads and writes in page-locked memory. A copy from or to the device is
// recorded where it is issued.
std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
  if (is_stream_thread || !racecheck().enabled()) return nullptr;
  auto name = function.operator_name();
  if (!name) return nullptr;
  auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op) return nullptr;
  const Signature& signature = signature_of(*op);
  if (!signature.touches) return nullptr;
  std::vector<Bytes> ranges;
  bool copies = false;
  auto visit = [&](const at::Tensor& tensor, bool writes) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
    copies |= tensor.device().type() == DEVICE && (op->schema().name().find("copy_") != std::string::npos);
    if (tensor.device().is_cpu() && tensor.layout() == c10::kStrided &&
        pinned_memory().is_page_locked(tensor.const_data_ptr()))
      ranges.push_back(range_of(tensor, writes));
  };
  auto inputs = function.inputs();
  for (size_t i = 0; i < inputs.size() && i < signature.written.size(); ++i) {
    if (inputs[i].isTensor()) {
      visit(inputs[i].toTensor(), signature.written[i]);
    } else if (inputs[i].isTensorList()) {
      for (const at::Tensor& tensor : inputs[i].toTensorVector()) visit(tensor, signature.written[i]);
    }
  }
  if (!copies && !ranges.empty()) racecheck().access_on_host(ranges, op->schema().name());
  return nullptr;
}

}  // namespace

void this_thread_is_a_stream() { is_stream_thread = true; }

std::string python_callers() {
  if (!Py_IsInitialized()) return "";
  py::gil_scoped_acquire gil;
  PyThreadState* thread = PyThreadState_Get();
  PyFrameObject* frame = PyThreadState_GetFrame(thread);
  std::ostringstream text;
  for (int found = 0; frame != nullptr && found < MOST_CALLERS;) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    std::string path = PyUnicode_AsUTF8(code->co_filename);
    if (is_shown(path)) {
      text << (found++ ? " < " : " in ") << path.substr(path.rfind('/') + 1) << ":" << PyFrame_GetLineNumber(frame) << " "
           << PyUnicode_AsUTF8(code->co_name);
    }
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  std::string result = text.str();
  return result.empty() ? " in autograd" : result;
}

void RaceCheck::enable(bool enabled) {
  if (callback_ != 0) at::removeCallback(std::exchange(callback_, 0));
  {
    std::lock_guard lock(mutex_);
    names_.clear();
    clocks_.clear();
    streams_.clear();
    memory_.clear();
    reported_.clear();
    ++session_;
    enabled_ = enabled;
  }
  if (!enabled) return;
  main_thread_ = lane_of_host();
  callback_ = at::addGlobalCallback(
      at::RecordFunctionCallback(&on_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

std::vector<std::string> RaceCheck::take_races() {
  std::lock_guard lock(mutex_);
  return std::exchange(races_, {});
}

// Lanes

RaceCheck::Lane RaceCheck::new_lane(std::string name) {
  names_.push_back(std::move(name));
  clocks_.emplace_back();
  return names_.size() - 1;
}

RaceCheck::Lane RaceCheck::lane_of_stream(int64_t stream) {
  auto found = streams_.find(stream);
  if (found != streams_.end()) return found->second;
  std::string name = stream == 0 ? "the default stream" : "stream " + std::to_string(stream);
  return streams_[stream] = new_lane(name);
}

// The mutex must not be held: the name of a new lane is Python's.
RaceCheck::Lane RaceCheck::lane_of_host() {
  if (lane_session != session_) {
    uint64_t session = session_;
    if (session > 0 && !clocks_.empty() && is_autograd_thread()) {
      thread_lane = main_thread_;
    } else {
      std::string name = "thread " + thread_name();
      std::lock_guard lock(mutex_);
      thread_lane = new_lane(name);
    }
    lane_session = session;
  }
  return thread_lane;
}

void RaceCheck::join(Lane lane, const Clock& earlier) {
  Clock& clock = clocks_[lane];
  if (clock.size() < earlier.size()) clock.resize(earlier.size());
  for (size_t i = 0; i < earlier.size(); ++i) clock[i] = std::max(clock[i], earlier[i]);
}

// Orders

RaceCheck::Snapshot RaceCheck::snapshot_of_stream(int64_t stream) {
  if (!enabled_) return nullptr;
  std::lock_guard lock(mutex_);
  return std::make_shared<Clock>(clocks_[lane_of_stream(stream)]);
}

RaceCheck::Snapshot RaceCheck::snapshot_of_host() {
  if (!enabled_) return nullptr;
  Lane host = lane_of_host();
  std::lock_guard lock(mutex_);
  return std::make_shared<Clock>(clocks_[host]);
}

void RaceCheck::order_stream_after(int64_t stream, const Snapshot& earlier) {
  if (!enabled_ || earlier == nullptr) return;
  std::lock_guard lock(mutex_);
  join(lane_of_stream(stream), *earlier);
}

void RaceCheck::order_host_after(const Snapshot& earlier) {
  if (!enabled_ || earlier == nullptr) return;
  Lane host = lane_of_host();
  std::lock_guard lock(mutex_);
  join(host, *earlier);
}

void RaceCheck::order_stream_after_host(int64_t stream) {
  if (!enabled_) return;
  Lane host = lane_of_host();
  std::lock_guard lock(mutex_);
  join(lane_of_stream(stream), Clock(clocks_[host]));
}

bool RaceCheck::host_is_after(const Snapshot& earlier) {
  Lane host = lane_of_host();
  std::lock_guard lock(mutex_);
  const Clock& clock = clocks_[host];
  for (size_t i = 0; i < earlier->size(); ++i)
    if ((*earlier)[i] > (i < clock.size() ? clock[i] : 0)) return false;
  return true;
}

// Accesses

void RaceCheck::access_on_stream(
    int64_t stream, const std::vector<Bytes>& ranges, const std::string& name, const std::string& caller) {
  if (!enabled_) return;
  order_stream_after_host(stream);
  if (ranges.empty()) return;
  std::lock_guard lock(mutex_);
  Lane lane = lane_of_stream(stream);
  if (clocks_[lane].size() <= lane) clocks_[lane].resize(lane + 1);
  ++clocks_[lane][lane];
  record(lane, clocks_[lane], ranges, name + caller);
}

void RaceCheck::access_on_host(const std::vector<Bytes>& ranges, const std::string& name) {
  if (!enabled_ || ranges.empty()) return;
  Lane lane = lane_of_host();
  std::string caller = python_callers();
  std::lock_guard lock(mutex_);
  if (clocks_[lane].size() <= lane) clocks_[lane].resize(lane + 1);
  ++clocks_[lane][lane];
  record(lane, clocks_[lane], ranges, name + caller);
}

void RaceCheck::allocated(const void* pointer, size_t size, int64_t stream) {
  if (!enabled_) return;
  std::string caller = python_callers();
  order_stream_after_host(stream);
  std::lock_guard lock(mutex_);
  Lane lane = lane_of_stream(stream);
  if (clocks_[lane].size() <= lane) clocks_[lane].resize(lane + 1);
  uint64_t count = ++clocks_[lane][lane];
  auto begin = reinterpret_cast<uintptr_t>(pointer);
  auto operation = std::make_shared<const std::string>("the last owner of memory that was allocated" + caller);
  replace(begin, begin + size, {{lane, count, true, operation}});
}

void RaceCheck::freed(const void* pointer, size_t size, int64_t stream, const std::vector<int64_t>& used_by) {
  if (!enabled_) return;
  std::string caller = python_callers();
  order_stream_after_host(stream);
  std::lock_guard lock(mutex_);
  Lane lane = lane_of_stream(stream);
  if (clocks_[lane].size() <= lane) clocks_[lane].resize(lane + 1);
  ++clocks_[lane][lane];
  // The allocator waits for the other streams, and this stream does not.
  Clock before = clocks_[lane];
  for (int64_t other : used_by) {
    const Clock& clock = clocks_[lane_of_stream(other)];
    if (before.size() < clock.size()) before.resize(clock.size());
    for (size_t i = 0; i < clock.size(); ++i) before[i] = std::max(before[i], clock[i]);
  }
  auto begin = reinterpret_cast<uintptr_t>(pointer);
  record(lane, before, {{begin, begin + size, true}}, "the next owner of memory that was freed" + caller);
}

void RaceCheck::forget(const void* pointer, size_t size) {
  if (!enabled_) return;
  std::lock_guard lock(mutex_);
  auto begin = reinterpret_cast<uintptr_t>(pointer);
  replace(begin, begin + size, {});
}

bool RaceCheck::includes(const Clock& clock, const Access& access) const {
  return access.lane < clock.size() && clock[access.lane] >= access.count;
}

// Record an access that happens at `clock`, the last operation of its lane.
void RaceCheck::record(Lane lane, const Clock& clock, const std::vector<Bytes>& ranges, std::string operation) {
  auto shared = std::make_shared<const std::string>(std::move(operation));
  for (const Bytes& range : ranges)
    if (range.begin < range.end) add(range, {lane, clocks_[lane][lane], range.writes, shared}, clock);
}

void RaceCheck::add(const Bytes& range, const Access& access, const Clock& clock) {
  split(range.begin);
  split(range.end);
  uintptr_t at = range.begin;
  for (auto it = memory_.lower_bound(at); at < range.end;) {
    if (it == memory_.end() || it->first > at) {
      // Nothing has accessed these bytes before.
      uintptr_t end = it == memory_.end() ? range.end : std::min(range.end, it->first);
      memory_.emplace_hint(it, at, Segment{end, {access}});
      at = end;
      continue;
    }
    auto& accesses = it->second.accesses;
    for (const Access& other : accesses) {
      bool conflicts = (other.writes || access.writes) && !includes(clock, other);
      if (!conflicts || races_.size() >= MOST_RACES) continue;
      auto text = [&](const Access& one) {
        return std::string(one.writes ? "write on " : "read on ") + names_[one.lane] + " by " + *one.operation;
      };
      if (!reported_.insert({text(other), text(access)}).second) continue;
      std::ostringstream race;
      race << text(other) << "\tand\t" << text(access) << "\tare not ordered, in the bytes from 0x" << std::hex << at
           << " to 0x" << it->second.end;
      races_.push_back(race.str());
    }
    // An ordered access that this one replaces cannot be the first to conflict with a later one.
    accesses.erase(
        std::remove_if(
            accesses.begin(), accesses.end(),
            [&](const Access& other) { return includes(clock, other) && (access.writes || !other.writes); }),
        accesses.end());
    accesses.push_back(access);
    at = it->second.end;
    ++it;
  }
}

// Let a segment begin at this byte, if there is one around it.
void RaceCheck::split(uintptr_t at) {
  auto it = memory_.lower_bound(at);
  if (it == memory_.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  Segment rest{it->second.end, it->second.accesses};
  it->second.end = at;
  memory_.emplace(at, std::move(rest));
}

void RaceCheck::replace(uintptr_t begin, uintptr_t end, std::vector<Access> accesses) {
  split(begin);
  split(end);
  memory_.erase(memory_.lower_bound(begin), memory_.lower_bound(end));
  if (!accesses.empty()) memory_.emplace(begin, Segment{end, std::move(accesses)});
}

RaceCheck& racecheck() {
  static RaceCheck* instance = new RaceCheck;
  return *instance;
}

}  // namespace software_gpu
