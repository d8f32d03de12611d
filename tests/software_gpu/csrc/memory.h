// The memory of the device, which the host cannot touch, and page-locked host memory.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "stream.h"

namespace software_gpu {

// Addresses that tensors carry are reserved without access: a host access ends in SIGSEGV. The bytes are at the same
// distance in another mapping, which only stream threads use.
class Arena {
 public:
  Arena();
  // Return the place where stream threads find the byte at a device address.
  char* real(const void* device) const {
    return const_cast<char*>(static_cast<const char*>(device)) + (bytes_ - addresses_);
  }
  bool contains(const void* pointer) const { return pointer >= addresses_ && pointer < addresses_ + SIZE; }
  // Map fresh memory, which holds NaN in every floating-point type. Return nullptr if the addresses are used up.
  char* map(size_t size);
  void unmap(char* device, size_t size);
  // Fill with NaN; whole pages give their memory back to the system.
  void poison(char* device, size_t size);

 private:
  static constexpr size_t SIZE = size_t{1} << 38;
  void map_poison(char* real, size_t size);

  char* addresses_;
  char* bytes_;
  int poison_file_;
  std::map<char*, size_t> free_;
};

class OutOfMemory : public std::exception {
 public:
  explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// A caching allocator with the rules of PyTorch's for CUDA: segments, best fit, splitting, and a pool per stream.
class DeviceMemory {
 public:
  using Statistics = c10::CachingDeviceAllocator::DeviceStats;

  // Raise OutOfMemory if the cache was emptied and the memory does not suffice even so.
  void* allocate(size_t size, Stream& stream);
  void free(void* pointer);
  // The block may be used again only after what is in the stream's queue when it is freed.
  void record_stream(void* pointer, Stream& stream);
  // Return whole free segments to the system.
  void empty_cache();
  Statistics statistics() const;
  void reset_peaks();
  size_t capacity() const;
  void set_capacity(size_t capacity);
  const Arena& arena() const { return arena_; }

 private:
  struct Block {
    char* pointer;
    size_t size;
    Stream* stream;
    bool small;
    bool allocated = false;
    Block* previous = nullptr;
    Block* next = nullptr;
    std::set<Stream*> used_by = {};
    // What the stream had in its queue when the block was given back, the poison included.
    Mark last_use = {};
  };
  struct BySize {
    bool operator()(const Block* a, const Block* b) const {
      return a->size != b->size ? a->size < b->size : a->pointer < b->pointer;
    }
  };
  using Pool = std::set<Block*, BySize>;
  struct Pending {
    Block* block;
    std::vector<Mark> uses;
  };
  Pool& pool(const Block& block) { return pools_[{block.stream, block.small}]; }
  Block* take(size_t size, Stream& stream);
  Block* find(size_t size, Stream& stream, bool small);
  Block* new_segment(size_t size, Stream& stream, bool small);
  void split(Block* block, size_t size);
  void give_back(Block* block);
  void give_back_finished();
  void merge(Block* block, Block* neighbour);
  void finish_frees();
  bool release_cached();
  std::string out_of_memory(size_t size) const;

  // No thread waits for a stream while it holds the mutex: a task of that stream may free memory.
  mutable std::mutex mutex_;
  Arena arena_;
  size_t capacity_ = 0;
  Statistics statistics_;
  std::map<std::pair<Stream*, bool>, Pool> pools_;
  std::map<void*, Block*> allocated_;
  std::vector<Pending> pending_;
};

DeviceMemory& device_memory();

// How copies find host memory: PINNED is what the allocator of pinned tensors provides.
enum class HostMemory { PAGEABLE, PINNED, REGISTERED };

class PinnedMemory {
 public:
  void* allocate(size_t size);
  void free(void* pointer);
  // Keep a block of the allocator until a copy has ended. A registered range is not kept: the caller has to.
  void record_use(const void* pointer, const Mark& copied);
  HostMemory kind(const void* pointer, size_t size) const;
  bool is_page_locked(const void* pointer) const;
  // Return what no tensor and no copy uses to the system.
  void empty_cache();
  // Return false if some of the memory is page-locked already.
  bool register_range(void* pointer, size_t size);
  // Return false if there is no such range.
  bool unregister_range(void* pointer);

 private:
  struct Block {
    size_t size;
    bool allocated;
    // The last copy on each stream.
    std::map<Stream*, Mark> uses = {};

    bool is_free() const;
  };
  mutable std::mutex mutex_;
  std::map<char*, Block> blocks_;
  std::map<char*, size_t> registered_;
};

PinnedMemory& pinned_memory();

}  // namespace software_gpu
