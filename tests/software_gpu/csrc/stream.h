// Streams are threads, each with a queue of tasks. Marks in a queue are what streams and host threads wait for.
//
// The adversaries are here, too: with `lazy`, a stream executes nothing before somebody waits for it, and with `jitter`
// it sleeps before each task, so that work which no wait orders does happen in a wrong order.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "clock.h"

namespace software_gpu {

struct Settings {
  bool lazy = false;
  // A lazy stream executes a task after these seconds even if nobody waits: CUDA promises progress, and a rank that
  // waits for another rank's stream would wait for ever otherwise.
  double lazy_s = 0.3;
  double jitter_s = 0;
  uint64_t seed = 0;
  // Execute a task before the time that it takes has passed, instead of after it. Then the duration of the arithmetic on
  // this machine is part of the emulated duration and does not come on top of it.
  bool execute_first = false;
  bool trace = false;
  // The rates of kernels and the latencies of launches and copies. The rates of copies are capacities of the clock.
  double flops_per_s = Clock::UNLIMITED;
  double device_bytes_per_s = Clock::UNLIMITED;
  double launch_s = 0;
  double copy_latency_s = 0;
};

struct Span {
  int64_t stream;
  std::string name;
  double start_s;
  double end_s;
};

struct Task {
  std::function<void()> work;
  std::string name;
  Engine engine = Engine::NONE;
  Cost cost{};
};

class Stream;

// A position in a stream's queue. An event that was recorded refers to one; an empty mark is always reached.
struct Mark {
  Stream* stream = nullptr;
  uint64_t position = 0;
  // The emulated moment at which the mark was reached. It is valid once the mark is reached.
  std::shared_ptr<std::atomic<double>> at_s;
};

class Stream {
 public:
  Stream(int64_t id, uint64_t seed);

  int64_t id() const { return id_; }
  void enqueue(Task task);
  // Mark everything that is in the queue now.
  Mark mark();
  // Let everything that is enqueued from now on wait for `mark`.
  void wait_for(const Mark& mark);
  bool reached(const Mark& mark) const;
  // Block the calling thread until the mark is reached.
  void block_until(const Mark& mark);
  bool idle() const;
  double now_on_stream_s() const;

 private:
  struct Queued {
    std::function<void()> run;
    double enqueued_s;
  };
  uint64_t push(std::function<void()> run);
  void loop();
  void run_task(const Task& task, double enqueued_s);

  const int64_t id_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Queued> queue_;
  uint64_t pushed_ = 0, completed_ = 0, demanded_ = 0;
  std::mt19937_64 random_;
  // The emulated moment until which this stream has worked; only its thread writes it.
  std::atomic<double> until_s_{0};
};

// All streams of the process, the settings, the first error of a task, and the record of what the host waited for.
class Runtime {
 public:
  Settings settings() const;
  void set_settings(const Settings& settings);

  Stream& default_stream() { return stream(0); }
  Stream& stream(int64_t id);
  Stream& new_stream();
  std::vector<Stream*> streams() const;

  // Wait on the host, with the GIL released; `reason` is recorded. Raise the first error of a task so far.
  void host_wait(const Mark& mark, const std::string& reason);
  void host_wait_for_all(const std::string& reason);
  // Wait without a record of it, as the driver does for its own purposes. Errors are not raised.
  void drain();

  void set_error(const std::string& message);
  void raise_error() const;
  std::string take_error();

  void add_span(Span span);
  std::vector<Span> take_spans();
  void on_host_wait(void (*callback)(const char*)) { callback_ = callback; }

  // Raise if the process was forked from one that had used the device already, as CUDA does.
  void check_not_forked() const;
  bool forked() const { return forked_; }
  void mark_forked() { forked_ = !streams().empty(); }

 private:
  mutable std::mutex mutex_;
  Settings settings_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::string error_;
  std::vector<Span> spans_;
  std::atomic<void (*)(const char*)> callback_{nullptr};
  std::atomic<bool> forked_{false};
};

Runtime& runtime();

}  // namespace software_gpu
