// Locks and waits of threads that may hold Python's global interpreter lock (the GIL).
#pragma once

#include <Python.h>

#include <mutex>

namespace software_gpu {

// Release the GIL, if the calling thread holds it: a stream may have to call Python before a wait can end.
class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Hold a mutex. The GIL is not held while waiting for it, since the thread that has the mutex may wait for a stream.
class LockWithoutGil {
 public:
  explicit LockWithoutGil(std::mutex& mutex) : lock_(mutex, std::defer_lock) { lock(); }
  void lock() {
    if (lock_.try_lock()) return;
    WithoutGil without_gil;
    lock_.lock();
  }
  void unlock() { lock_.unlock(); }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace software_gpu
