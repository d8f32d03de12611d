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

struct Cost {
  std::array<double, NUM_RESOURCES> amounts{};
  // Seconds before the work begins to use resources, such as the launch of a kernel.
  double latency_s = 0;
};

// Seconds since the library was loaded, on the clock by which threads sleep.
double now_s();

class Clock {
 public:
  static constexpr double UNLIMITED = std::numeric_limits<double>::infinity();

  // Set the capacity of each resource per second. UNLIMITED means that using it takes no time.
  void set_capacities(const std::array<double, NUM_RESOURCES>& capacities);

  bool takes_time(const Cost& cost) const;

  // Add work that starts at `start_s` or, if that lies before what is simulated already, as early as possible.
  struct Flow;
  std::shared_ptr<Flow> start(Engine engine, const Cost& cost, double start_s);

  // Sleep until the flow ends, and return the moment of its end.
  double wait(const std::shared_ptr<Flow>& flow);

 private:
  void advance(double until_s);
  double end_if_unchanged(const Flow& flow) const;
  std::vector<Flow*> moving() const;
  std::vector<double> speeds(const std::vector<Flow*>& flows) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::array<double, NUM_RESOURCES> capacities_ = [] {
    std::array<double, NUM_RESOURCES> unlimited;
    unlimited.fill(UNLIMITED);
    return unlimited;
  }();
  double simulated_s_ = 0;
  // The flows that have not ended, in the order of arrival.
  std::deque<std::shared_ptr<Flow>> flows_;
};

Clock& the_clock();

}  // namespace software_gpu
