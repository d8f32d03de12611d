// A check of happens-before by vector clocks, as compute-sanitizer's racecheck: it also sees a wrong order that was lucky.
//
// A lane is a stream or a host thread. Its clock counts, for each lane, the operations that are known to have happened
// before. Clocks are joined where work is issued, whatever the timing: from a host thread to a stream by each task, from
// stream to stream by events, and from a stream to a host thread by a wait of the host. Hand-overs between host threads
// are reported by Python. Two accesses to the same byte, one of them a write, must be ordered.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace software_gpu {

// The bytes from `begin` to `end` that an operation reads or writes.
struct Bytes {
  uintptr_t begin, end;
  bool writes;
};

class RaceCheck {
 public:
  using Lane = size_t;
  using Clock = std::vector<uint64_t>;
  using Snapshot = std::shared_ptr<const Clock>;

  bool enabled() const { return enabled_; }
  // Forget everything, and check from now on, or no longer. No work may be in flight. Races are kept until they are taken.
  void enable(bool enabled);
  std::vector<std::string> take_races();

  // Give the calling thread a lane. Its name is Python's, so call this before any lock is taken.
  void know_this_thread() {
    if (enabled_) lane_of_host();
  }

  // Orders. Each returns at once if nothing is checked.
  Snapshot snapshot_of_stream(int64_t stream);
  Snapshot snapshot_of_host();
  // Order what the stream, or the calling thread, does from now on after what the snapshot includes.
  void order_stream_after(int64_t stream, const Snapshot& earlier);
  void order_host_after(const Snapshot& earlier);
  void order_stream_after_host(int64_t stream);
  // Whether the calling thread has waited for all that the snapshot includes.
  bool host_is_after(const Snapshot& earlier);

  // Accesses, of which `caller` is a text that Python's callers give.
  void access_on_stream(int64_t stream, const std::vector<Bytes>& ranges, const std::string& name, const std::string& caller);
  void access_on_host(const std::vector<Bytes>& ranges, const std::string& name);
  // The memory is a new tensor's. Work of other streams must be ordered after this moment: the allocator may have reused
  // memory that kernels of its stream still use.
  void allocated(const void* pointer, size_t size, int64_t stream);
  // The memory goes back to the stream, which may write to it once the streams `used_by` have reached this moment.
  void freed(const void* pointer, size_t size, int64_t stream, const std::vector<int64_t>& used_by);
  // Host memory whose reuse its allocator orders.
  void forget(const void* pointer, size_t size);

 private:
  struct Access {
    Lane lane;
    uint64_t count;
    bool writes;
    std::shared_ptr<const std::string> operation;
  };
  struct Segment {
    uintptr_t end;
    std::vector<Access> accesses;
  };
  Lane lane_of_stream(int64_t stream);
  Lane lane_of_host();
  Lane new_lane(std::string name);
  void join(Lane lane, const Clock& earlier);
  bool includes(const Clock& clock, const Access& access) const;
  void record(Lane lane, const Clock& clock, const std::vector<Bytes>& ranges, std::string operation);
  void add(const Bytes& range, const Access& access, const Clock& clock);
  void split(uintptr_t at);
  void replace(uintptr_t begin, uintptr_t end, std::vector<Access> accesses);

  std::atomic<bool> enabled_{false};
  std::atomic<uint64_t> session_{0};
  // A leaf: no other lock is taken, and no Python is called, while it is held.
  std::mutex mutex_;
  std::vector<std::string> names_;
  std::vector<Clock> clocks_;
  std::map<int64_t, Lane> streams_;
  Lane main_thread_ = 0;
  // By the first byte: the bytes of a segment have the same accesses, those that a later access may conflict with.
  std::map<uintptr_t, Segment> memory_;
  std::set<std::pair<std::string, std::string>> reported_;
  std::vector<std::string> races_;
  uint64_t callback_ = 0;
};

RaceCheck& racecheck();

// Return the nearest callers in Python, at most five, that are neither PyTorch's nor the device's.
std::string python_callers();

// Mark the calling thread as a stream's: what it does is not the host's.
void this_thread_is_a_stream();

}  // namespace software_gpu
