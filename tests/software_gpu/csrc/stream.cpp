#include "stream.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "gil.h"

namespace software_gpu {

namespace {

std::chrono::duration<double> seconds(double count) { return std::chrono::duration<double>(count); }

}  // namespace

Stream::Stream(int64_t id, uint64_t seed) : id_(id), random_(seed + id) { std::thread([this] { loop(); }).detach(); }

uint64_t Stream::push(std::function<void()> run) {
  std::lock_guard lock(mutex_);
  queue_.push_back({std::move(run), now_s()});
  changed_.notify_all();
  return ++pushed_;
}

void Stream::enqueue(Task task) {
  double enqueued_s = now_s();
  push([this, task = std::move(task), enqueued_s] { run_task(task, enqueued_s); });
}

Mark Stream::mark() {
  auto at_s = std::make_shared<std::atomic<double>>(0);
  double enqueued_s = now_s();
  uint64_t position = push([this, at_s, enqueued_s] { *at_s = std::max<double>(until_s_, enqueued_s); });
  return {this, position, at_s};
}

void Stream::wait_for(const Mark& mark) {
  if (mark.stream == nullptr || mark.stream == this) return;
  double enqueued_s = now_s();
  push([this, mark, enqueued_s] {
    mark.stream->block_until(mark);
    double before_s = std::max<double>(until_s_, enqueued_s);
    until_s_ = std::max<double>(before_s, *mark.at_s);
    if (runtime().settings().trace) runtime().add_span({id_, "wait", before_s, until_s_});
  });
}

bool Stream::reached(const Mark& mark) const {
  std::lock_guard lock(mutex_);
  return completed_ >= mark.position;
}

void Stream::block_until(const Mark& mark) {
  std::unique_lock lock(mutex_);
  demanded_ = std::max(demanded_, mark.position);
  changed_.notify_all();
  changed_.wait(lock, [&] { return completed_ >= mark.position; });
}

bool Stream::idle() const {
  std::lock_guard lock(mutex_);
  return completed_ == pushed_;
}

double Stream::now_on_stream_s() const { return std::max<double>(until_s_, now_s()); }

void Stream::loop() {
  for (;;) {
    Queued next;
    Settings settings = runtime().settings();
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
    if (settings.jitter_s > 0)
      std::this_thread::sleep_for(seconds(std::uniform_real_distribution(0.0, settings.jitter_s)(random_)));
    try {
      next.run();
    } catch (const std::exception& error) {
      runtime().set_error(error.what());
    }
    // Free what the task refers to before anybody can know that it has ended.
    next.run = nullptr;
    std::lock_guard lock(mutex_);
    ++completed_;
    changed_.notify_all();
  }
}

void Stream::run_task(const Task& task, double enqueued_s) {
  double start_s = std::max<double>(until_s_, enqueued_s);
  if (!the_clock().takes_time(task.cost)) {
    if (task.work) task.work();
    until_s_ = runtime().settings().execute_first ? start_s : now_s();
  } else {
    auto flow = the_clock().start(task.engine, task.cost, start_s);
    // After an error, the stream still takes its time, and then reports the error.
    bool first = runtime().settings().execute_first;
    if (first && task.work) task.work();
    until_s_ = the_clock().wait(flow);
    if (!first && task.work) task.work();
  }
  if (runtime().settings().trace) runtime().add_span({id_, task.name, start_s, until_s_});
}

Settings Runtime::settings() const {
  std::lock_guard lock(mutex_);
  return settings_;
}

void Runtime::set_settings(const Settings& settings) {
  std::lock_guard lock(mutex_);
  settings_ = settings;
}

Stream& Runtime::stream(int64_t id) {
  check_not_forked();
  std::lock_guard lock(mutex_);
  if (streams_.empty()) {
    static bool registered = false;
    if (!registered) pthread_atfork(nullptr, nullptr, [] { runtime().mark_forked(); });
    registered = true;
    streams_.push_back(std::make_unique<Stream>(0, settings_.seed));
  }
  if (id < 0 || id >= static_cast<int64_t>(streams_.size())) throw std::runtime_error("there is no such stream");
  return *streams_[id];
}

Stream& Runtime::new_stream() {
  stream(0);
  std::lock_guard lock(mutex_);
  streams_.push_back(std::make_unique<Stream>(streams_.size(), settings_.seed));
  return *streams_.back();
}

std::vector<Stream*> Runtime::streams() const {
  std::lock_guard lock(mutex_);
  std::vector<Stream*> result;
  for (auto& stream : streams_) result.push_back(stream.get());
  return result;
}

void Runtime::host_wait(const Mark& mark, const std::string& reason) {
  check_not_forked();
  if (mark.stream != nullptr) {
    if (auto callback = callback_.load()) callback(reason.c_str());
    WithoutGil without_gil;
    mark.stream->block_until(mark);
  }
  raise_error();
}

void Runtime::host_wait_for_all(const std::string& reason) {
  check_not_forked();
  if (auto callback = callback_.load()) callback(reason.c_str());
  drain();
  raise_error();
}

void Runtime::drain() {
  WithoutGil without_gil;
  // A mark per stream first, so that lazy streams that wait for each other are all asked.
  std::vector<Mark> marks;
  for (Stream* stream : streams()) marks.push_back(stream->mark());
  for (Mark& mark : marks) mark.stream->block_until(mark);
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
