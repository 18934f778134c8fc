// A small pool: a launch is n tasks; the caller takes part; tasks are claimed one by one.
//
// Tasks only ever own whole outputs, never a part of a sum, so that results cannot
// depend on how many threads there are or on which of them ran what.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace lk {

using Task = void (*)(void* context, int64_t index);

class Pool {
 public:
  // Throws std::system_error where the system does not grant so many threads.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  int threads() const { return threads_; }
  // Runs task(context, i) for every i in [0, n); returns when all are done.
  void run(Task task, void* context, int64_t n);
  // Called in a forked child before anything else.
  void forked();

 private:
  bool start();
  void stop();
  void work();
  bool help(uint64_t generation);

  const int threads_;
  std::vector<std::thread> workers_;
  std::mutex launch_;  // one launch at a time
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  // Generation in the high half, next unclaimed index in the low half: a claim by a
  // thread that still believes in an older launch cannot succeed.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  std::atomic<Task> task_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<uint32_t> count_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  bool alone_ = false;  // in a forked child whose threads are yet to be started
};

template <typename F>
void parallel(Pool* pool, int64_t n, F&& body) {
  if (n <= 1 || pool == nullptr || pool->threads() == 1) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  using Body = typename std::remove_reference<F>::type;
  pool->run([](void* context, int64_t i) { (*static_cast<Body*>(context))(i); },
            const_cast<void*>(static_cast<const void*>(&body)), n);
}

// Scratch of the calling thread, at least `bytes` long, 64-byte aligned, never shrunk.
void* scratch(size_t bytes);

}  // namespace lk
