#include "clock.h"

#include <algorithm>
#include <utility>

namespace software_gpu {

namespace {

using SteadyClock = std::chrono::steady_clock;
const SteadyClock::time_point loaded_at = SteadyClock::now();
constexpr double NEVER_S = std::numeric_limits<double>::infinity();
constexpr double LEAST_SPEED = 0.05;
// Two moments that are closer than this are the same.
constexpr double RESOLUTION_S = 1e-9;

}  // namespace

double now_s() { return std::chrono::duration<double>(SteadyClock::now() - loaded_at).count(); }

struct Clock::Flow {
  Engine engine;
  Cost cost;
  double alone_s;     // the duration of the whole work if nothing else runs
  double left_s;      // the part of `alone_s` that is left
  double moves_at_s;  // when it arrives or, once it is the head of its engine's queue, when its latency has passed
  double ended_s = NEVER_S;
  bool head = false;
};

void Clock::set_capacities(const Amounts& capacities) {
  std::lock_guard lock(mutex_);
  advance(now_s());
  capacities_ = capacities;
  changed_.notify_all();
}

void Clock::set_slowdown(double by_host_work, double by_copies) {
  std::lock_guard lock(mutex_);
  advance(now_s());
  slowed_by_host_work_ = by_host_work;
  slowed_by_copies_ = by_copies;
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
  flow->moves_at_s = start_s;
  advance(start_s);
  flows_.push_back(flow);
  start_heads();
  if (flow->head) catch_up(*flow);
  end_finished();
  changed_.notify_all();
  return flow;
}

// A thread wakes some microseconds after the flow that it waited for has ended, and the simulation has gone on until
// then. Do now what the new flow should have done meanwhile, so that these microseconds do not add up.
void Clock::catch_up(Flow& flow) {
  double late_s = simulated_s_ - flow.moves_at_s;
  if (late_s <= 0) return;
  auto moves = moving();
  auto speed = speeds(moves);
  size_t own = std::find(moves.begin(), moves.end(), &flow) - moves.begin();
  double moved_s = std::min(late_s, flow.left_s / speed[own]);
  std::vector<Flow*> others = moves;
  others.erase(others.begin() + own);
  auto speed_without = speeds(others);
  for (size_t i = 0; i < others.size(); ++i)
    others[i]->left_s += (speed_without[i] - speed[i + (i >= own)]) * moved_s;
  flow.left_s -= speed[own] * moved_s;
  if (flow.left_s <= RESOLUTION_S) end(flow, flow.moves_at_s + moved_s);
  remove_ended();
}

double Clock::simulate(const std::shared_ptr<Flow>& flow) {
  std::lock_guard lock(mutex_);
  while (flow->ended_s == NEVER_S) {
    double next_s = NEVER_S;
    for (auto& other : flows_) next_s = std::min(next_s, end_if_unchanged(*other));
    advance(next_s);
  }
  return flow->ended_s;
}

double Clock::wait(const std::shared_ptr<Flow>& flow) {
  std::unique_lock lock(mutex_);
  for (;;) {
    advance(now_s());
    if (flow->ended_s != NEVER_S) {
      lag_s_ = std::max(lag_s_, now_s() - flow->ended_s);
      return flow->ended_s;
    }
    double end_s = end_if_unchanged(*flow);
    if (end_s == NEVER_S) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(
          lock, loaded_at + std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(end_s)));
    }
  }
}

double Clock::take_lag_s() {
  std::lock_guard lock(mutex_);
  return std::exchange(lag_s_, 0);
}

// Simulate until `until_s`, from one end of a flow or of its latency to the next.
void Clock::advance(double until_s) {
  while (simulated_s_ < until_s) {
    double next_s = until_s;
    for (auto& flow : flows_)
      if (flow->moves_at_s > simulated_s_ + RESOLUTION_S) next_s = std::min(next_s, flow->moves_at_s);
    auto moves = moving();
    auto speed = speeds(moves);
    for (size_t i = 0; i < moves.size(); ++i) next_s = std::min(next_s, simulated_s_ + moves[i]->left_s / speed[i]);
    for (size_t i = 0; i < moves.size(); ++i) moves[i]->left_s -= speed[i] * (next_s - simulated_s_);
    simulated_s_ = next_s;
    end_finished();
  }
}

// End the flows that have nothing left to do, and those behind them that have nothing to do.
void Clock::end_finished() {
  bool any = true;
  while (std::exchange(any, false)) {
    for (Flow* flow : moving()) {
      if (flow->left_s > RESOLUTION_S) continue;
      end(*flow, simulated_s_);
      any = true;
    }
    remove_ended();
  }
}

void Clock::end(Flow& flow, double ended_s) {
  flow.ended_s = ended_s;
  if (flow.engine != Engine::NONE) free_at_s(flow.engine) = ended_s;
}

void Clock::remove_ended() {
  size_t before = flows_.size();
  flows_.erase(
      std::remove_if(flows_.begin(), flows_.end(), [](auto& flow) { return flow->ended_s != NEVER_S; }), flows_.end());
  if (flows_.size() == before) return;
  start_heads();
  changed_.notify_all();
}

// Let the first flow of each engine's queue begin, and every flow without an engine.
void Clock::start_heads() {
  std::array<bool, NUM_ENGINES> taken{};
  for (auto& flow : flows_) {
    double free_s = 0;
    if (flow->engine != Engine::NONE) {
      if (std::exchange(taken[static_cast<int>(flow->engine)], true)) continue;
      free_s = free_at_s(flow->engine);
    }
    if (flow->head) continue;
    flow->head = true;
    flow->moves_at_s = std::max(flow->moves_at_s, free_s) + flow->cost.latency_s;
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
  // The thread is woken when the flow before it in its engine's queue ends.
  if (!flow.head) return NEVER_S;
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
    Amounts use{};
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
  for (size_t i = 0; i < flows.size(); ++i)
    if (flows[i]->cost.of_model) result[i] *= speed_of_model(flows);
  return result;
}

// The host that launches the model's kernels shares memory bandwidth, caches and cores with updates and copies.
double Clock::speed_of_model(const std::vector<Flow*>& flows) const {
  bool host_works = false, copies = false;
  for (auto* flow : flows) {
    host_works |= flow->cost.amounts[CPU] > 0;
    copies |= flow->engine == Engine::H2D || flow->engine == Engine::D2H;
  }
  return std::max(LEAST_SPEED, 1.0 - slowed_by_host_work_ * host_works - slowed_by_copies_ * copies);
}

Clock& the_clock() {
  // Never destroyed, since stream threads use it until the process has ended.
  static Clock* clock = [] {
    Amounts unlimited;
    unlimited.fill(Clock::UNLIMITED);
    return new Clock(unlimited);
  }();
  return *clock;
}

}  // namespace software_gpu
