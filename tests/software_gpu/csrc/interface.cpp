// The functions that Python calls with ctypes, which releases the GIL during each call.
#include <c10/core/Device.h>

#include <cstring>
#include <sstream>

#include "backend.h"

using namespace software_gpu;

namespace {

thread_local std::string last_error;

// Run a function that may raise. Return 0, or 1 with the message in `last_error`.
template <class Function>
int guarded(Function function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

struct CRange {
  uint64_t begin, end;
  int32_t writes;
};

std::vector<Bytes> ranges_from(const CRange* ranges, int32_t count) {
  std::vector<Bytes> result;
  for (int32_t i = 0; i < count; ++i)
    result.push_back({ranges[i].begin, ranges[i].end, ranges[i].writes != 0});
  return result;
}

Cost cost_from(const double* amounts, double latency_s) {
  Cost cost;
  std::copy(amounts, amounts + NUM_RESOURCES, cost.amounts.begin());
  cost.latency_s = latency_s;
  return cost;
}

}  // namespace

extern "C" {

struct CSettings {
  double lazy_s, jitter_s;
  double capacities[NUM_RESOURCES];
  double flops_per_s, device_bytes_per_s, launch_s, copy_latency_s, slowed_by_host_work, slowed_by_copies;
  uint64_t seed, memory_bytes;
  int32_t lazy, execute_first, trace, emulated, kernels_per_product, racecheck;
};

const char* software_gpu_last_error() { return last_error.c_str(); }

void software_gpu_configure(const CSettings* c) {
  Settings settings;
  settings.lazy = c->lazy;
  settings.lazy_s = c->lazy_s;
  settings.jitter_s = c->jitter_s;
  settings.seed = c->seed;
  settings.execute_first = c->execute_first;
  settings.trace = c->trace;
  settings.emulated = c->emulated;
  settings.flops_per_s = c->flops_per_s;
  settings.device_bytes_per_s = c->device_bytes_per_s;
  settings.launch_s = c->launch_s;
  settings.copy_latency_s = c->copy_latency_s;
  settings.kernels_per_product = c->kernels_per_product;
  runtime().set_settings(settings);
  Amounts capacities;
  std::copy(c->capacities, c->capacities + NUM_RESOURCES, capacities.begin());
  the_clock().set_capacities(capacities);
  the_clock().set_slowdown(c->slowed_by_host_work, c->slowed_by_copies);
  device_memory().set_capacity(c->memory_bytes);
  if (racecheck().enabled() == static_cast<bool>(c->racecheck)) return;
  runtime().drain();
  racecheck().enable(c->racecheck);
}

// Wait until all streams are idle, without a record of the wait and without raising errors.
void software_gpu_drain() { runtime().drain(); }

// Copy the first error of a task to `buffer`, and forget it.
void software_gpu_take_error(char* buffer, uint64_t size) {
  std::string error = runtime().take_error();
  strncpy(buffer, error.c_str(), size - 1);
  buffer[size - 1] = 0;
}

void software_gpu_set_error(const char* message) { runtime().set_error(message); }

uint64_t software_gpu_real_address(uint64_t device) {
  return reinterpret_cast<uint64_t>(device_memory().arena().real(reinterpret_cast<void*>(device)));
}

// Enqueue `callback(argument)` on a stream. The task accesses `num_ranges` ranges.
int software_gpu_launch(
    int64_t stream, void (*callback)(uint64_t), uint64_t argument, const char* name, int32_t engine,
    const double* amounts, double latency_s, const CRange* ranges, int32_t num_ranges) {
  return guarded([=] {
    auto work = [=] { callback(argument); };
    Task task{work, name, static_cast<Engine>(engine), cost_from(amounts, latency_s)};
    task.ranges = ranges_from(ranges, num_ranges);
    runtime().stream(stream).enqueue(std::move(task));
  });
}

// Record that the calling thread accesses these ranges, as far as they are page-locked.
void software_gpu_access_on_host(const char* name, const CRange* ranges, int32_t num_ranges) {
  auto accessed = ranges_from(ranges, num_ranges);
  std::erase_if(accessed, [](const Bytes& bytes) {
    return !pinned_memory().is_page_locked(reinterpret_cast<void*>(bytes.begin));
  });
  racecheck().access_on_host(accessed, name);
}

// Return what the calling thread has done and waited for, for `software_gpu_order_host_after` on another thread.
void* software_gpu_snapshot_of_host() { return new RaceCheck::Snapshot(racecheck().snapshot_of_host()); }

void software_gpu_order_host_after(void* snapshot) {
  racecheck().order_host_after(*static_cast<RaceCheck::Snapshot*>(snapshot));
}

void software_gpu_delete_snapshot(void* snapshot) { delete static_cast<RaceCheck::Snapshot*>(snapshot); }

// Return the races since the last call, one per line. They are valid until the next call on this thread.
const char* software_gpu_take_races() {
  thread_local std::string text;
  text.clear();
  for (const std::string& race : racecheck().take_races()) text += race + '\n';
  return text.c_str();
}

// Begin and end work of the calling thread that takes emulated time.
void* software_gpu_begin_host_work(const double* amounts) {
  Cost cost = cost_from(amounts, 0);
  if (!the_clock().takes_time(cost)) return nullptr;
  return new std::shared_ptr<Clock::Flow>(the_clock().start(Engine::NONE, cost, now_s()));
}

void software_gpu_end_host_work(void* work) {
  if (work == nullptr) return;
  auto* flow = static_cast<std::shared_ptr<Clock::Flow>*>(work);
  the_clock().wait(*flow);
  delete flow;
}

// Write the ends of work that starts at `start_s`, in ascending order, to `end_s`. Nothing sleeps, and nothing else runs.
void software_gpu_simulate(
    int32_t count, const double* capacities, const int32_t* engines, const double* amounts, const double* latency_s,
    const double* start_s, double* end_s) {
  Amounts capacity;
  std::copy(capacities, capacities + NUM_RESOURCES, capacity.begin());
  Clock clock(capacity);
  std::vector<std::shared_ptr<Clock::Flow>> flows;
  for (int32_t i = 0; i < count; ++i) {
    Cost cost = cost_from(amounts + i * NUM_RESOURCES, latency_s[i]);
    flows.push_back(clock.start(static_cast<Engine>(engines[i]), cost, start_s[i]));
  }
  for (int32_t i = 0; i < count; ++i) end_s[i] = clock.simulate(flows[i]);
}

int32_t software_gpu_register(uint64_t address, uint64_t size) {
  return pinned_memory().register_range(reinterpret_cast<void*>(address), size);
}

int32_t software_gpu_unregister(uint64_t address) {
  return pinned_memory().unregister_range(reinterpret_cast<void*>(address));
}

void software_gpu_empty_host_cache() { pinned_memory().empty_cache(); }

int32_t software_gpu_forked() { return runtime().forked(); }

void software_gpu_on_host_wait(void (*callback)(const char*)) { runtime().on_host_wait(callback); }

double software_gpu_take_lag_s() { return the_clock().take_lag_s(); }

// Return the spans since the last call, one per line. They are valid until the next call on this thread.
const char* software_gpu_take_spans() {
  thread_local std::string text;
  std::ostringstream lines;
  lines.precision(17);
  for (const Span& span : runtime().take_spans())
    lines << span.stream << '\t' << span.name << '\t' << span.start_s << '\t' << span.end_s << '\n';
  text = lines.str();
  return text.c_str();
}

}  // extern "C"
