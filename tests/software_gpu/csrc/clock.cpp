#include "clock.h"

#include <algorithm>
#include <cmath>

namespace software_gpu {

namespace {

using SteadyClock = std::chrono::steady_clock;
const SteadyClock::time_point loaded_at = SteadyClock::now();
constexpr double NEVER_S = std::numeric_limits<double>::infinity();
// Two moments that are closer than this are the same.
constexpr double RESOLUTION_S = 1e-9;

}  // namespace

double now_s() { return std::chrono::duration<double>(SteadyClock::now() - loaded_at).count(); }

struct Clock::Flow {
  Engine engine;
  Cost cost;
  double alone_s;  // the duration of the whole work if nothing else runs
  double left_s;   // the part of `alone_s` that is left
  double moves_at_s;
  double ended_s = NEVER_S;
  bool head = false;  // whether it has reached the head of its engine's queue
};

void Clock::set_capacities(const std::array<double, NUM_RESOURCES>& capacities) {
  std::lock_guard lock(mutex_);
  advance(now_s());
  capacities_ = capacities;
  changed_.notify_all();
}

bool Clock::takes_time(const Cost& cost) const {
  std::lock_guard lock(mutex_);
  if (cost.latency_s > 0) return true;
  for (int resource = 0; resource < NUM_RESOURCES; ++resource)
    if (cost.amounts[resource] > 0 && capacities_[resource] != UNLIMITED) return true;
  return false;
}

std::shared_ptr<Clock::Flow> Clock::start(Engine engine, const Cost& cost, double start_s) {
  std::lock_guard lock(mutex_);
  auto flow = std::make_shared<Flow>();
  flow->engine = engine;
  flow->cost = cost;
  flow->alone_s = 0;
  for (int resource = 0; resource < NUM_RESOURCES; ++resource)
    flow->alone_s = std::max(flow->alone_s, cost.amounts[resource] / capacities_[resource]);
  flow->left_s = flow->alone_s;
  advance(start_s);
  flow->moves_at_s = std::max(start_s, simulated_s_);
  flows_.push_back(flow);
  changed_.notify_all();
  return flow;
}

double Clock::wait(const std::shared_ptr<Flow>& flow) {
  std::unique_lock lock(mutex_);
  for (;;) {
    advance(now_s());
    if (flow->ended_s != NEVER_S) return flow->ended_s;
    double end_s = end_if_unchanged(*flow);
    if (end_s == NEVER_S) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(
          lock, loaded_at + std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(end_s)));
    }
  }
}

// Simulate until `until_s`, from one end of a flow or of its latency to the next.
void Clock::advance(double until_s) {
  while (simulated_s_ < until_s) {
    bool taken[3] = {false, false, false};
    for (auto& flow : flows_) {
      if (flow->engine == Engine::NONE) {
        if (!flow->head) flow->moves_at_s = std::max(flow->moves_at_s, simulated_s_) + flow->cost.latency_s;
        flow->head = true;
        continue;
      }
      bool& engine_is_taken = taken[static_cast<int>(flow->engine)];
      // A flow that arrives later must not take the engine before it has arrived.
      if (!engine_is_taken && !flow->head && flow->moves_at_s <= simulated_s_ + RESOLUTION_S) {
        flow->head = true;
        flow->moves_at_s = std::max(flow->moves_at_s, simulated_s_) + flow->cost.latency_s;
      }
      engine_is_taken = true;
    }
    double next_s = until_s;
    for (auto& flow : flows_)
      if (flow->moves_at_s > simulated_s_ + RESOLUTION_S) next_s = std::min(next_s, flow->moves_at_s);
    auto moves = moving();
    auto speed = speeds(moves);
    for (size_t i = 0; i < moves.size(); ++i) next_s = std::min(next_s, simulated_s_ + moves[i]->left_s / speed[i]);
    for (size_t i = 0; i < moves.size(); ++i) {
      moves[i]->left_s -= speed[i] * (next_s - simulated_s_);
      if (moves[i]->left_s <= RESOLUTION_S) moves[i]->ended_s = next_s;
    }
    simulated_s_ = next_s;
    size_t before = flows_.size();
    flows_.erase(
        std::remove_if(flows_.begin(), flows_.end(), [](auto& flow) { return flow->ended_s != NEVER_S; }),
        flows_.end());
    if (flows_.size() != before) changed_.notify_all();
  }
}

std::vector<Clock::Flow*> Clock::moving() const {
  std::vector<Flow*> result;
  for (auto& flow : flows_)
    if (flow->head && flow->moves_at_s <= simulated_s_ + RESOLUTION_S) result.push_back(flow.get());
  return result;
}

// Return the next moment at which the thread of this flow has to look again.
double Clock::end_if_unchanged(const Flow& flow) const {
  if (!flow.head) {
    // It is woken when the flow before it ends; only an arrival in the future has to be looked at.
    return flow.moves_at_s > simulated_s_ ? flow.moves_at_s : NEVER_S;
  }
  if (flow.moves_at_s > simulated_s_ + RESOLUTION_S) return flow.moves_at_s;
  auto moves = moving();
  auto speed = speeds(moves);
  for (size_t i = 0; i < moves.size(); ++i)
    if (moves[i] == &flow) return simulated_s_ + flow.left_s / speed[i];
  return NEVER_S;
}

// Return each flow's speed relative to running alone: all rise together until a resource is full, the flows that use it
// stay, and the others rise further.
std::vector<double> Clock::speeds(const std::vector<Flow*>& flows) const {
  std::vector<double> result(flows.size(), 1.0);
  std::vector<bool> rising(flows.size());
  for (size_t i = 0; i < flows.size(); ++i) rising[i] = flows[i]->alone_s > 0;
  auto left = capacities_;
  double share = 0;
  while (std::find(rising.begin(), rising.end(), true) != rising.end() && share < 1.0) {
    std::array<double, NUM_RESOURCES> use{};
    for (size_t i = 0; i < flows.size(); ++i)
      if (rising[i])
        for (int resource = 0; resource < NUM_RESOURCES; ++resource)
          use[resource] += flows[i]->cost.amounts[resource] / flows[i]->alone_s;
    double step = 1.0 - share;
    int full = NUM_RESOURCES;
    for (int resource = 0; resource < NUM_RESOURCES; ++resource)
      if (use[resource] > 0 && left[resource] / use[resource] < step - 1e-12) {
        step = std::max(0.0, left[resource] / use[resource]);
        full = resource;
      }
    for (int resource = 0; resource < NUM_RESOURCES; ++resource)
      if (left[resource] != UNLIMITED) left[resource] -= step * use[resource];
    share += step;
    for (size_t i = 0; i < flows.size(); ++i)
      if (rising[i] && (full == NUM_RESOURCES || flows[i]->cost.amounts[full] > 0)) {
        result[i] = share;
        rising[i] = false;
      }
  }
  return result;
}

Clock& the_clock() {
  // Never destroyed, since stream threads use it until the process has ended.
  static Clock* clock = new Clock;
  return *clock;
}

}  // namespace software_gpu
