#include "stream.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

#include "gil.h"

namespace software_gpu {

namespace {

std::chrono::duration<double> seconds(double count) { return std::chrono::duration<double>(count); }

}  // namespace

bool Mark::reached() const { return stream == nullptr || stream->reached(position); }

Stream::Stream(int64_t id) : id_(id) { std::thread([this] { loop(); }).detach(); }

Mark Stream::push(std::function<void()> run) {
  racecheck().know_this_thread();
  std::lock_guard lock(mutex_);
  racecheck().order_stream_after_host(id_);
  return push_locked(std::move(run));
}

Mark Stream::push_locked(std::function<void()> run) {
  queue_.push_back({std::move(run), now_s()});
  changed_.notify_all();
  return {this, ++pushed_, nullptr, racecheck().snapshot_of_stream(id_)};
}

Mark Stream::enqueue(Task task) {
  double enqueued_s = now_s();
  racecheck().know_this_thread();
  std::string caller;
  if (racecheck().enabled() && !task.ranges.empty()) caller = python_callers();
  std::lock_guard lock(mutex_);
  racecheck().access_on_stream(id_, task.ranges, task.name, caller);
  return push_locked([this, task = std::move(task), enqueued_s] { run_task(task, enqueued_s); });
}

Mark Stream::last() const {
  std::lock_guard lock(mutex_);
  return {const_cast<Stream*>(this), pushed_, nullptr, racecheck().snapshot_of_stream(id_)};
}

Mark Stream::record() {
  auto at_s = std::make_shared<std::atomic<double>>(0);
  double enqueued_s = now_s();
  Mark mark = push([this, at_s, enqueued_s] { *at_s = std::max(until_s_, enqueued_s); });
  mark.at_s = at_s;
  return mark;
}

void Stream::wait_for(const Mark& mark) {
  if (mark.stream == nullptr || mark.stream == this) return;
  double enqueued_s = now_s();
  racecheck().order_stream_after(id_, mark.happened);
  push([this, mark, enqueued_s] {
    mark.stream->block_until(mark.position);
    double before_s = std::max(until_s_, enqueued_s);
    until_s_ = std::max<double>(before_s, *mark.at_s);
    if (runtime().settings().trace) runtime().add_span({id_, "wait", before_s, until_s_});
  });
}

bool Stream::reached(uint64_t position) const {
  std::lock_guard lock(mutex_);
  return completed_ >= position;
}

void Stream::block_until(uint64_t position) {
  std::unique_lock lock(mutex_);
  demanded_ = std::max(demanded_, position);
  changed_.notify_all();
  changed_.wait(lock, [&] { return completed_ >= position; });
}

void Stream::loop() {
  this_thread_is_a_stream();
  std::mt19937_64 random;
  std::optional<uint64_t> seeded_version;
  for (;;) {
    Queued next;
    Settings settings;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      settings = runtime().settings();
      if (settings.lazy) {
        double until_s = queue_.front().enqueued_s + settings.lazy_s;
        changed_.wait_for(lock, seconds(until_s - now_s()), [&] { return demanded_ > completed_; });
      }
      next = std::move(queue_.front());
      queue_.pop_front();
    }
    if (seeded_version != settings.version) {
      random.seed(settings.seed + id_);
      seeded_version = settings.version;
    }
    if (settings.jitter_s > 0) {
      double delay_s = std::uniform_real_distribution(0.0, settings.jitter_s)(random), begin_s = now_s();
      std::this_thread::sleep_for(seconds(delay_s));
      if (settings.trace) runtime().add_span({id_, "jitter", begin_s, begin_s + delay_s});
    }
    try {
      next.run();
    } catch (const std::exception& error) {
      runtime().set_error(error.what());
    }
    // Free what the task refers to before a waiting thread can know that it has ended.
    next.run = nullptr;
    std::lock_guard lock(mutex_);
    ++completed_;
    changed_.notify_all();
  }
}

void Stream::run_task(const Task& task, double enqueued_s) {
  Settings settings = runtime().settings();
  double start_s = std::max(until_s_, enqueued_s);
  // A task that fails takes its time, too.
  std::exception_ptr error;
  auto execute = [&] {
    try {
      task.work();
    } catch (...) {
      error = std::current_exception();
    }
  };
  if (the_clock().takes_time(task.cost)) {
    Cost part = task.cost;
    for (double& amount : part.amounts) amount /= task.parts;
    auto flow = the_clock().start(task.engine, part, start_s);
    if (settings.execute_first) execute();
    until_s_ = the_clock().wait(flow);
    // The other parts are launched while the first one runs.
    part.latency_s = 0;
    for (int number = 1; number < task.parts; ++number)
      until_s_ = the_clock().wait(the_clock().start(task.engine, part, until_s_));
    if (!settings.execute_first) execute();
  } else {
    execute();
    until_s_ = settings.emulated ? start_s : now_s();
  }
  if (error) std::rethrow_exception(error);
  if (settings.trace) runtime().add_span({id_, task.name, start_s, until_s_});
}

Settings Runtime::settings() const {
  std::lock_guard lock(mutex_);
  return settings_;
}

void Runtime::set_settings(Settings settings) {
  std::lock_guard lock(mutex_);
  settings.version = settings_.version + 1;
  settings_ = settings;
}

Stream& Runtime::stream(int64_t id) {
  check_not_forked();
  std::lock_guard lock(mutex_);
  if (streams_.empty()) {
    // The child takes no lock here: a stream's thread, which it does not have, may have held any at the fork.
    pthread_atfork(nullptr, nullptr, [] { runtime().forked_ = true; });
    streams_.push_back(std::make_unique<Stream>(0));
  }
  if (id < 0 || id >= static_cast<int64_t>(streams_.size())) throw std::runtime_error("there is no such stream");
  return *streams_[id];
}

Stream& Runtime::new_stream() {
  stream(0);
  std::lock_guard lock(mutex_);
  streams_.push_back(std::make_unique<Stream>(streams_.size()));
  return *streams_.back();
}

std::vector<Stream*> Runtime::streams() const {
  std::lock_guard lock(mutex_);
  std::vector<Stream*> result;
  for (auto& stream : streams_) result.push_back(stream.get());
  return result;
}

void Runtime::host_wait(const Mark& mark, const std::string& reason, bool promised) {
  check_not_forked();
  if (mark.stream != nullptr) {
    if (auto callback = callback_.load()) callback(reason.c_str());
    WithoutGil without_gil;
    mark.stream->block_until(mark.position);
    if (promised) racecheck().order_host_after(mark.happened);
  }
  raise_error();
}

void Runtime::host_wait_for_all(const std::string& reason) {
  check_not_forked();
  if (auto callback = callback_.load()) callback(reason.c_str());
  for (Stream* stream : streams()) racecheck().order_host_after(stream->last().happened);
  drain();
  raise_error();
}

void Runtime::drain() {
  WithoutGil without_gil;
  for (Stream* stream : streams()) stream->block_until(stream->last().position);
}

void Runtime::set_error(const std::string& message) {
  std::lock_guard lock(mutex_);
  if (error_.empty()) error_ = message;
}

void Runtime::raise_error() const {
  std::lock_guard lock(mutex_);
  if (!error_.empty()) throw std::runtime_error("software GPU error in an earlier task: " + error_);
}

std::string Runtime::take_error() {
  std::lock_guard lock(mutex_);
  return std::exchange(error_, "");
}

void Runtime::add_span(Span span) {
  std::lock_guard lock(mutex_);
  spans_.push_back(std::move(span));
}

std::vector<Span> Runtime::take_spans() {
  std::lock_guard lock(mutex_);
  return std::exchange(spans_, {});
}

void Runtime::check_not_forked() const {
  if (forked_)
    throw std::runtime_error(
        "Cannot re-initialize the software GPU in forked subprocess. To use it with multiprocessing, you must use the "
        "'spawn' start method");
}

Runtime& runtime() {
  // Never destroyed, since stream threads use it until the process has ended.
  static Runtime* instance = new Runtime;
  return *instance;
}

}  // namespace software_gpu
