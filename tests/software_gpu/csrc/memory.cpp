#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "gil.h"

namespace software_gpu {

namespace {

constexpr size_t KIB = 1024, MIB = 1024 * KIB;
constexpr size_t PAGE = 4 * KIB;
constexpr size_t ROUNDING = 512;
constexpr size_t SMALL = MIB, SMALL_SEGMENT = 2 * MIB, LARGE_SEGMENT = 20 * MIB, LARGE = 10 * MIB;
// All bits set is NaN in every floating-point type.
constexpr int POISON = 0xFF;
constexpr size_t POISON_FILE = 16 * MIB;
// PyTorch keeps statistics per pool, and for all pools, which are those that are read.
constexpr size_t ALL = 0;

size_t rounded_up(size_t size, size_t multiple) { return (size + multiple - 1) / multiple * multiple; }

void* mapped(void* address, size_t size, int protection, int flags, int file) {
  void* result = mmap(address, size, protection, flags, file, 0);
  if (result == MAP_FAILED) throw std::runtime_error(std::string("the software GPU cannot map memory: ") + strerror(errno));
  return result;
}

constexpr int RESERVED = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

}  // namespace

Arena::Arena() {
  addresses_ = static_cast<char*>(mapped(nullptr, SIZE, PROT_NONE, RESERVED, -1));
  bytes_ = static_cast<char*>(mapped(nullptr, SIZE, PROT_NONE, RESERVED, -1));
  free_[addresses_] = SIZE;
  poison_file_ = memfd_create("software_gpu_poison", MFD_CLOEXEC);
  std::vector<char> poison(POISON_FILE, static_cast<char>(POISON));
  if (poison_file_ < 0 || write(poison_file_, poison.data(), POISON_FILE) != static_cast<ssize_t>(POISON_FILE))
    throw std::runtime_error("the software GPU cannot create a file in memory");
}

char* Arena::map(size_t size) {
  for (auto& [begin, free_size] : free_) {
    if (free_size < size) continue;
    char* device = begin;
    size_t left = free_size - size;
    free_.erase(begin);
    if (left > 0) free_[device + size] = left;
    map_poison(real(device), size);
    return device;
  }
  return nullptr;
}

void Arena::unmap(char* device, size_t size) {
  mapped(real(device), size, PROT_NONE, RESERVED | MAP_FIXED, -1);
  auto [it, _] = free_.emplace(device, size);
  auto next = std::next(it);
  if (next != free_.end() && it->first + it->second == next->first) {
    it->second += next->second;
    free_.erase(next);
  }
  if (it != free_.begin()) {
    auto before = std::prev(it);
    if (before->first + before->second == it->first) {
      before->second += it->second;
      free_.erase(it);
    }
  }
}

void Arena::poison(char* device, size_t size) {
  char* begin = real(device);
  char* end = begin + size;
  constexpr size_t WORTH_MAPPING = 8 * MIB;
  if (size < WORTH_MAPPING) {
    memset(begin, POISON, size);
    return;
  }
  char* first_page = reinterpret_cast<char*>(rounded_up(reinterpret_cast<size_t>(begin), PAGE));
  char* last_page = reinterpret_cast<char*>(reinterpret_cast<size_t>(end) / PAGE * PAGE);
  memset(begin, POISON, first_page - begin);
  map_poison(first_page, last_page - first_page);
  memset(last_page, POISON, end - last_page);
}

// Map the file of poison over and over. Pages that are only read share the file's, so that large blocks cost nothing.
void Arena::map_poison(char* real, size_t size) {
  for (size_t at = 0; at < size; at += POISON_FILE) {
    size_t part = std::min(POISON_FILE, size - at);
    mapped(real + at, part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, poison_file_);
  }
  // A forked child does not inherit the device's memory.
  madvise(real, size, MADV_DONTFORK);
}

void* DeviceMemory::allocate(size_t size, Stream& stream) {
  if (size == 0) return nullptr;
  size_t rounded = rounded_up(size, ROUNDING);
  LockWithoutGil lock(mutex_);
  Block* block = take(rounded, stream);
  if (block == nullptr) ++statistics_.num_alloc_retries;
  while (block == nullptr) {
    lock.unlock();
    finish_frees();
    lock.lock();
    bool cache_is_empty = release_cached();
    block = take(rounded, stream);
    if (block == nullptr && cache_is_empty) {
      ++statistics_.num_ooms;
      throw OutOfMemory(out_of_memory(rounded));
    }
  }
  split(block, rounded);
  block->allocated = true;
  allocated_[block->pointer] = block;
  statistics_.allocated_bytes[ALL].increase(block->size);
  statistics_.active_bytes[ALL].increase(block->size);
  lock.unlock();
  racecheck().allocated(block->pointer, block->size, stream.id());
  return block->pointer;
}

std::string DeviceMemory::out_of_memory(size_t size) const {
  auto mib = [](size_t bytes) { return std::to_string(bytes / MIB) + " MiB"; };
  size_t reserved = statistics_.reserved_bytes[ALL].current;
  return "Software GPU out of memory. Tried to allocate " + mib(size) + " (" + std::to_string(size) +
         " bytes). The GPU has a total capacity of " + mib(capacity_) + " of which " +
         mib(capacity_ - std::min(capacity_, reserved)) + " is free. " + mib(statistics_.allocated_bytes[ALL].current) +
         " is allocated, and " + mib(reserved) + " is reserved.";
}

void DeviceMemory::free(void* pointer) {
  // Tensors that a forked child collects are its parent's.
  if (pointer == nullptr || runtime().forked()) return;
  LockWithoutGil lock(mutex_);
  auto found = allocated_.find(pointer);
  if (found == allocated_.end()) throw std::runtime_error("memory of the software GPU was freed that is not allocated");
  Block* block = found->second;
  std::vector<int64_t> used_by;
  for (Stream* stream : block->used_by) used_by.push_back(stream->id());
  // Another thread cannot free the same memory meanwhile.
  lock.unlock();
  racecheck().freed(block->pointer, block->size, block->stream->id(), used_by);
  lock.lock();
  allocated_.erase(pointer);
  statistics_.allocated_bytes[ALL].decrease(block->size);
  std::vector<Mark> uses;
  for (Stream* stream : block->used_by)
    if (stream != block->stream) uses.push_back(stream->last());
  block->used_by.clear();
  if (uses.empty()) {
    give_back(block);
  } else {
    pending_.push_back({block, std::move(uses)});
  }
}

void DeviceMemory::record_stream(void* pointer, Stream& stream) {
  if (pointer == nullptr) return;
  LockWithoutGil lock(mutex_);
  auto found = allocated_.find(pointer);
  if (found == allocated_.end()) throw std::runtime_error("record_stream of memory that is not allocated");
  found->second->used_by.insert(&stream);
}

void DeviceMemory::empty_cache() {
  runtime().check_not_forked();
  finish_frees();
  LockWithoutGil lock(mutex_);
  release_cached();
}

// Wait until no stream uses any more what has been freed. Like cudaFree, this waits for the device.
void DeviceMemory::finish_frees() {
  runtime().drain();
  {
    LockWithoutGil lock(mutex_);
    give_back_finished();
  }
  // Poison is still on the way to what was given back now.
  runtime().drain();
}

DeviceMemory::Statistics DeviceMemory::statistics() const {
  runtime().check_not_forked();
  LockWithoutGil lock(mutex_);
  return statistics_;
}

void DeviceMemory::reset_peaks() {
  LockWithoutGil lock(mutex_);
  for (auto* statistic : {&statistics_.allocated_bytes, &statistics_.active_bytes, &statistics_.reserved_bytes,
                          &statistics_.segment})
    (*statistic)[ALL].reset_peak();
}

size_t DeviceMemory::capacity() const {
  LockWithoutGil lock(mutex_);
  return capacity_;
}

void DeviceMemory::set_capacity(size_t capacity) {
  LockWithoutGil lock(mutex_);
  capacity_ = capacity;
}

DeviceMemory::Block* DeviceMemory::take(size_t size, Stream& stream) {
  give_back_finished();
  bool small = size <= SMALL;
  Block* block = find(size, stream, small);
  return block != nullptr ? block : new_segment(size, stream, small);
}

DeviceMemory::Block* DeviceMemory::find(size_t size, Stream& stream, bool small) {
  Block least{nullptr, size, &stream, small};
  Pool& blocks = pool(least);
  auto found = blocks.lower_bound(&least);
  if (found == blocks.end()) return nullptr;
  Block* block = *found;
  blocks.erase(found);
  return block;
}

DeviceMemory::Block* DeviceMemory::new_segment(size_t size, Stream& stream, bool small) {
  size_t segment = small ? SMALL_SEGMENT : size < LARGE ? LARGE_SEGMENT : rounded_up(size, SMALL_SEGMENT);
  if (statistics_.reserved_bytes[ALL].current + segment > capacity_) return nullptr;
  char* pointer = arena_.map(segment);
  if (pointer == nullptr) return nullptr;
  statistics_.segment[ALL].increase(1);
  statistics_.reserved_bytes[ALL].increase(segment);
  return new Block{pointer, segment, &stream, small};
}

void DeviceMemory::split(Block* block, size_t size) {
  size_t left = block->size - size;
  if (left < (block->small ? ROUNDING : SMALL + 1)) return;
  Block* rest = new Block{block->pointer + size, left, block->stream, block->small};
  rest->last_use = block->last_use;
  rest->previous = block;
  rest->next = block->next;
  if (rest->next != nullptr) rest->next->previous = rest;
  block->next = rest;
  block->size = size;
  pool(*rest).insert(rest);
}

// Put a block into its stream's pool, for reuse by what is issued on this stream from now on.
void DeviceMemory::give_back(Block* block) {
  statistics_.active_bytes[ALL].decrease(block->size);
  auto work = [this, pointer = block->pointer, size = block->size] { arena_.poison(pointer, size); };
  block->last_use = block->stream->enqueue({work, "free"});
  block->allocated = false;
  for (Block* neighbour : {block->previous, block->next})
    if (neighbour != nullptr && !neighbour->allocated && pool(*neighbour).erase(neighbour) > 0) merge(block, neighbour);
  pool(*block).insert(block);
}

void DeviceMemory::merge(Block* block, Block* neighbour) {
  if (neighbour == block->previous) {
    block->pointer = neighbour->pointer;
    block->previous = neighbour->previous;
    if (block->previous != nullptr) block->previous->next = block;
  } else {
    block->next = neighbour->next;
    if (block->next != nullptr) block->next->previous = block;
  }
  block->size += neighbour->size;
  delete neighbour;
}

// Give back the blocks that other streams had used, as far as these streams are done with them.
void DeviceMemory::give_back_finished() {
  auto finished = std::stable_partition(pending_.begin(), pending_.end(), [](const Pending& pending) {
    return !std::all_of(pending.uses.begin(), pending.uses.end(), [](const Mark& use) { return use.reached(); });
  });
  for (auto pending = finished; pending != pending_.end(); ++pending) give_back(pending->block);
  pending_.erase(finished, pending_.end());
}

// Return the free segments to the system that no stream uses any more. Return false if a stream still uses some, which
// other threads have freed meanwhile.
bool DeviceMemory::release_cached() {
  bool all = pending_.empty();
  for (auto& [_, blocks] : pools_) {
    for (auto it = blocks.begin(); it != blocks.end();) {
      Block* block = *it;
      bool whole = block->previous == nullptr && block->next == nullptr, used = !block->last_use.reached();
      if (!whole || used) {
        all &= !whole;
        ++it;
        continue;
      }
      it = blocks.erase(it);
      statistics_.segment[ALL].decrease(1);
      statistics_.reserved_bytes[ALL].decrease(block->size);
      arena_.unmap(block->pointer, block->size);
      delete block;
    }
  }
  return all;
}

DeviceMemory& device_memory() {
  static DeviceMemory* memory = new DeviceMemory;
  return *memory;
}

bool PinnedMemory::Block::is_free() const {
  return !allocated && std::all_of(uses.begin(), uses.end(), [](auto& use) { return use.second.reached(); });
}

void* PinnedMemory::allocate(size_t size) {
  runtime().check_not_forked();
  if (size == 0) return nullptr;
  size_t rounded = PAGE;
  while (rounded < size) rounded *= 2;
  std::lock_guard lock(mutex_);
  auto reusable = [&](auto& entry) { return entry.second.size == rounded && entry.second.is_free(); };
  auto found = std::find_if(blocks_.begin(), blocks_.end(), reusable);
  char* pointer =
      found != blocks_.end()
          ? found->first
          : static_cast<char*>(mapped(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1));
  blocks_[pointer] = {rounded, true};
  racecheck().forget(pointer, rounded);
  memset(pointer, POISON, size);
  return pointer;
}

void PinnedMemory::free(void* pointer) {
  if (pointer == nullptr || runtime().forked()) return;
  std::lock_guard lock(mutex_);
  blocks_.at(static_cast<char*>(pointer)).allocated = false;
}

void PinnedMemory::record_use(const void* pointer, const Mark& copied) {
  std::lock_guard lock(mutex_);
  auto block = std::prev(blocks_.upper_bound(static_cast<char*>(const_cast<void*>(pointer))));
  block->second.uses[copied.stream] = copied;
}

HostMemory PinnedMemory::kind(const void* pointer, size_t size) const {
  if (runtime().forked()) return HostMemory::PAGEABLE;
  std::lock_guard lock(mutex_);
  char* address = static_cast<char*>(const_cast<void*>(pointer));
  auto inside = [&](auto& ranges, auto size_of) {
    auto range = ranges.upper_bound(address);
    if (range == ranges.begin()) return false;
    --range;
    return address + size <= range->first + size_of(range->second);
  };
  if (inside(registered_, [](size_t bytes) { return bytes; })) return HostMemory::REGISTERED;
  // As CUDA does, refuse memory of which only a part is registered.
  for (auto& [begin, bytes] : registered_)
    if (address < begin + bytes && begin < address + size)
      throw std::runtime_error("invalid argument: a copy leaves page-locked memory");
  if (inside(blocks_, [](const Block& block) { return block.allocated ? block.size : 0; })) return HostMemory::PINNED;
  return HostMemory::PAGEABLE;
}

bool PinnedMemory::is_page_locked(const void* pointer) const {
  std::lock_guard lock(mutex_);
  char* address = static_cast<char*>(const_cast<void*>(pointer));
  auto block = blocks_.upper_bound(address);
  if (block != blocks_.begin() && address < std::prev(block)->first + std::prev(block)->second.size) return true;
  auto range = registered_.upper_bound(address);
  return range != registered_.begin() && address < std::prev(range)->first + std::prev(range)->second;
}

void PinnedMemory::empty_cache() {
  std::lock_guard lock(mutex_);
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    if (it->second.is_free()) {
      munmap(it->first, it->second.size);
      it = blocks_.erase(it);
    } else {
      ++it;
    }
  }
}

bool PinnedMemory::register_range(void* pointer, size_t size) {
  std::lock_guard lock(mutex_);
  char* begin = static_cast<char*>(pointer);
  for (auto& [address, bytes] : registered_)
    if (begin < address + bytes && address < begin + size) return false;
  for (auto& [address, block] : blocks_)
    if (begin < address + block.size && address < begin + size) return false;
  registered_[begin] = size;
  racecheck().forget(begin, size);
  return true;
}

bool PinnedMemory::unregister_range(void* pointer) {
  std::lock_guard lock(mutex_);
  return registered_.erase(static_cast<char*>(pointer)) > 0;
}

PinnedMemory& pinned_memory() {
  static PinnedMemory* memory = new PinnedMemory;
  return *memory;
}

}  // namespace software_gpu
