// Streams are threads, each with a queue of tasks. Marks in a queue are what streams and host threads wait for.
//
// The adversaries are here, too: with `lazy`, a stream executes nothing before the host or another stream waits for it,
// and with `jitter` it sleeps before each task, so that work which no wait orders does happen in a wrong order.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "clock.h"
#include "racecheck.h"

namespace software_gpu {

struct Settings {
  bool lazy = false;
  // A lazy stream executes a task after these seconds without a wait: CUDA promises progress, and a rank that waits for
  // another rank's stream would wait for ever otherwise.
  double lazy_s = 0.3;
  double jitter_s = 0;
  uint64_t seed = 0;
  // Execute a task before the time that it takes has passed, instead of after it. Then the duration of the arithmetic on
  // this machine is part of the emulated duration and does not come on top of it.
  bool execute_first = false;
  bool trace = false;
  // Whether a rate is limited. Work whose own rate is unlimited then takes no time, and not that of this machine.
  bool emulated = false;
  // The number of times that settings were set. The random numbers of jitter begin anew each time.
  uint64_t version = 0;
  // The rates of kernels and the latencies of launches and copies. The rates of copies are capacities of the clock.
  double flops_per_s = Clock::UNLIMITED;
  double device_bytes_per_s = Clock::UNLIMITED;
  double launch_s = 0;
  double copy_latency_s = 0;
  // The number of kernels of the emulated run that one product of matrices stands for.
  int kernels_per_product = 1;
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
  // The number of equal parts that the engine executes one after the other. Tasks of other streams may be executed
  // between them.
  int parts = 1;
  // The memory that the task reads and writes, for the race check.
  std::vector<Bytes> ranges = {};
};

class Stream;

// A position in a stream's queue. An event that was recorded refers to one. An empty mark is always reached.
struct Mark {
  Stream* stream = nullptr;
  uint64_t position = 0;
  // The emulated moment at which an event was reached, which is known once the mark is reached. Other marks have none.
  std::shared_ptr<std::atomic<double>> at_s = nullptr;
  // What has happened when the mark is reached, for the race check.
  RaceCheck::Snapshot happened = nullptr;

  bool reached() const;
};

class Stream {
 public:
  explicit Stream(int64_t id);

  int64_t id() const { return id_; }
  // Return the mark that is reached when the task has been executed.
  Mark enqueue(Task task);
  // Return the mark of everything that is in the queue now.
  Mark last() const;
  // Enqueue the record of an event.
  Mark record();
  // Let everything that is enqueued from now on wait for the event at `mark`.
  void wait_for(const Mark& mark);
  bool reached(uint64_t position) const;
  // Block the calling thread until the position is reached.
  void block_until(uint64_t position);

 private:
  struct Queued {
    std::function<void()> run;
    double enqueued_s;
  };
  Mark push(std::function<void()> run);
  Mark push_locked(std::function<void()> run);
  void loop();
  void run_task(const Task& task, double enqueued_s);

  const int64_t id_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Queued> queue_;
  uint64_t pushed_ = 0, completed_ = 0, demanded_ = 0;
  // The emulated moment until which this stream has worked. Only its thread uses it.
  double until_s_ = 0;
};

// All streams of the process, the settings, the first error of a task, and the record of what the host waited for.
class Runtime {
 public:
  Settings settings() const;
  void set_settings(Settings settings);

  Stream& stream(int64_t id);
  Stream& new_stream();
  std::vector<Stream*> streams() const;

  // Wait on the host, with the GIL released; `reason` is recorded. Raise the first error of a task so far. A wait that
  // CUDA does not promise orders nothing.
  void host_wait(const Mark& mark, const std::string& reason, bool promised = true);
  void host_wait_for_all(const std::string& reason);
  // Wait without a record of it, as the driver does for its own purposes. Errors are not raised.
  void drain();

  // Keep the error of a task, unless an earlier one is kept.
  void set_error(const std::string& message);
  std::string take_error();

  void add_span(Span span);
  std::vector<Span> take_spans();
  void on_host_wait(void (*callback)(const char*)) { callback_ = callback; }

  // Raise if the process was forked from one that had used the device already, as CUDA does.
  void check_not_forked() const;
  bool forked() const { return forked_; }

 private:
  void raise_error() const;

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
