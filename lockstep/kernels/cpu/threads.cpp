#include "threads.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <new>
#include <system_error>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace lk {
namespace {

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A worker that has nothing to do spins about as long as the gap between two
// launches of one step, then sleeps.
constexpr auto kSpin = std::chrono::microseconds(60);

// Pools of this process. A fork waits for who is changing the list.
std::mutex g_lock;
std::vector<Pool*> g_pools;

void before_fork() { g_lock.lock(); }
void after_fork_in_parent() { g_lock.unlock(); }
void after_fork_in_child() {
  for (Pool* pool : g_pools) pool->forked();
  g_lock.unlock();
}

struct ForkHook {
  ForkHook() { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }
} g_hook;

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
  if (!start()) {
    stop();
    throw std::system_error(EAGAIN, std::generic_category());
  }
  std::lock_guard<std::mutex> lock(g_lock);
  g_pools.push_back(this);
}

bool Pool::start() {
  try {
    for (int i = 1; i < threads_; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

// In a child that was just forked: its parent's threads are not there, and what one of them
// had locked would stay locked.
void Pool::forked() {
  new (&launch_) std::mutex;
  new (&sleep_) std::mutex;
  new (&wake_) std::condition_variable;
  sleepers_ = 0;
  alone_ = true;
}

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(sleep_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) {
    if (alone_)
      worker.detach();
    else
      worker.join();
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(g_lock);
    g_pools.erase(std::find(g_pools.begin(), g_pools.end(), this));
  }
  stop();
}

bool Pool::help(uint64_t generation) {
  bool helped = false;
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while ((ticket >> 32) == generation) {
    const Task task = task_.load(std::memory_order_relaxed);
    void* const context = context_.load(std::memory_order_relaxed);
    const uint32_t count = count_.load(std::memory_order_relaxed);
    const uint32_t index = uint32_t(ticket);
    if (index >= count) return helped;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire))
      continue;
    task(context, index);
    done_.fetch_add(1, std::memory_order_release);
    helped = true;
    ticket = ticket_.load(std::memory_order_acquire);
  }
  return helped;
}

void Pool::work() {
  uint64_t seen = 0;
  for (;;) {
    auto deadline = std::chrono::steady_clock::now() + kSpin;
    uint64_t generation;
    for (int spins = 0;; ++spins) {
      generation = ticket_.load(std::memory_order_acquire) >> 32;
      if (generation != seen || stop_.load(std::memory_order_relaxed)) break;
      relax();
      if ((spins & 63) == 63 && std::chrono::steady_clock::now() > deadline) {
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return stop_.load() || (ticket_.load() >> 32) != seen; });
        sleepers_.fetch_sub(1);
      }
    }
    if (stop_.load()) return;
    help(generation);
    seen = generation;
  }
}

void Pool::run(Task task, void* context, int64_t n) {
  std::lock_guard<std::mutex> launch(launch_);
  if (alone_) {
    for (auto& worker : workers_) worker.detach();
    workers_.clear();
    alone_ = false;
    start();  // fewer do it as well: whoever is there takes the next task
  }
  done_.store(0, std::memory_order_relaxed);
  task_.store(task, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  count_.store(uint32_t(n), std::memory_order_relaxed);
  const uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store((generation & 0xffffffffu) << 32);
  if (sleepers_.load() > 0) {
    { std::lock_guard<std::mutex> lock(sleep_); }
    wake_.notify_all();
  }
  help(generation & 0xffffffffu);
  for (int spins = 0; done_.load(std::memory_order_acquire) != uint32_t(n); ++spins) {
    relax();
    if (spins > 2000) std::this_thread::yield();
  }
}

namespace {
struct Scratch {
  void* data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
};
thread_local Scratch t_scratch;
}  // namespace

void* scratch(size_t bytes) {
  if (t_scratch.size < bytes) {
    std::free(t_scratch.data);
    t_scratch.size = (bytes + 4095) / 4096 * 4096;
    t_scratch.data = std::aligned_alloc(64, t_scratch.size);
    if (t_scratch.data == nullptr) {
      t_scratch.size = 0;
      throw std::bad_alloc();
    }
  }
  return t_scratch.data;
}

}  // namespace lk

#pragma GCC visibility push(default)
extern "C" {

// Null where the system does not grant so many threads.
void* lk_pool_new(int64_t threads) {
  try {
    return new lk::Pool(int(threads));
  } catch (const std::exception&) {
    return nullptr;
  }
}
void lk_pool_free(void* pool) { delete static_cast<lk::Pool*>(pool); }

// Asks for huge pages under the whole pages of [start, start + bytes): a wish, not a need.
void lk_advise_huge(void* start, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (uintptr_t(start) + page - 1) / page * page;
  const uintptr_t last = (uintptr_t(start) + uintptr_t(bytes)) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)start;
  (void)bytes;
#endif
}
}
#pragma GCC visibility pop
