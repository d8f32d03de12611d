// The time model: how long copies, kernels and host work take on the emulated machine.
//
// Work is a flow that uses amounts of shared resources. All flows that run at the same time share each resource
// max-min fairly, so that two copies in opposite directions and a CPU update slow each other down where host memory or
// the link is full. A thread that executes a flow sleeps until the moment at which the flow ends in this model.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

namespace software_gpu {

// Bytes per second, except the GPU and the CPU, which are counted in seconds per second.
enum Resource { H2D, D2H, BOTH_DIRECTIONS, PAGEABLE, HOST_MEMORY, GPU, CPU, NUM_RESOURCES };

// Work on one engine runs in the order in which it arrives. Work without an engine starts at once.
enum class Engine { H2D, D2H, COMPUTE, NONE };
constexpr int NUM_ENGINES = 3;

using Amounts = std::array<double, NUM_RESOURCES>;

struct Cost {
  Amounts amounts{};
  // Seconds before the work begins to use resources, such as the launch of a kernel.
  double latency_s = 0;
  // Whether it is a kernel of the model, which the host slows down that launches it.
  bool of_model = false;
};

// Seconds since the library was loaded, on the clock by which threads sleep.
double now_s();

class Clock {
 public:
  static constexpr double UNLIMITED = std::numeric_limits<double>::infinity();

  // The capacity of each resource is an amount per second. UNLIMITED means that using it takes no time.
  explicit Clock(const Amounts& capacities) : capacities_(capacities) {}
  void set_capacities(const Amounts& capacities);
  // Set the shares of their speed that the model's kernels lose while the host works, and while a copy between host and device runs.
  void set_slowdown(double by_host_work, double by_copies);

  bool takes_time(const Cost& cost) const;

  // Add work that starts at `start_s`, or when the work that was added to its engine before has ended.
  struct Flow;
  std::shared_ptr<Flow> start(Engine engine, const Cost& cost, double start_s);

  // Sleep until the flow ends, and return the moment of its end.
  double wait(const std::shared_ptr<Flow>& flow);
  // Return the longest time since the last call by which this machine was behind the emulated one: from the end of a
  // flow until the thread that executes it could go on.
  double take_lag_s();
  // Return the moment at which the flow ends if nothing else is added, without sleeping.
  double simulate(const std::shared_ptr<Flow>& flow);

 private:
  void advance(double until_s);
  void catch_up(Flow& flow);
  void end(Flow& flow, double ended_s);
  void end_finished();
  void remove_ended();
  void start_heads();
  double& free_at_s(Engine engine) { return free_at_s_[static_cast<int>(engine)]; }
  double end_if_unchanged(const Flow& flow) const;
  std::vector<Flow*> moving() const;
  std::vector<double> speeds(const std::vector<Flow*>& flows) const;
  double speed_of_model(const std::vector<Flow*>& flows) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Amounts capacities_;
  double slowed_by_host_work_ = 0, slowed_by_copies_ = 0;
  double simulated_s_ = 0;
  double lag_s_ = 0;
  // The end of the last work on each engine.
  std::array<double, NUM_ENGINES> free_at_s_{};
  // The flows that have not ended, in the order of arrival.
  std::deque<std::shared_ptr<Flow>> flows_;
};

Clock& the_clock();

}  // namespace software_gpu
