// Pool: persistent worker threads that share one job at a time by an atomic chunk counter.
//
// The caller works too; workers spin briefly after a job and then sleep, so an idle process uses no CPU. Which thread
// runs which chunk is not fixed: an op must give the same bits for any assignment. Every chunk runs with denormals
// flushed.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace coterie {

class Pool {
 public:
  using Work = void (*)(void* context, std::int64_t chunk);

  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs work(context, 0..chunks-1) and returns when all are done. Calls from several threads take turns.
  void run(std::int64_t chunks, Work work, void* context);

  // A number that changes whenever a chunk was taken: a sign of life from inside a long call, for any thread.
  std::uint64_t progress() const {
    return ticket_.load(std::memory_order_relaxed) + alone_.load(std::memory_order_relaxed);
  }

 private:
  void loop();
  bool take(std::uint64_t& seen);
  void share(std::int64_t chunks, Work work, void* context);

  // Job ticket: epoch in the high half, next chunk in the low half (kClosed between jobs).
  std::atomic<std::uint64_t> ticket_;
  std::atomic<Work> work_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<std::uint32_t> chunks_{0};
  std::atomic<std::uint32_t> done_{0};
  std::atomic<std::uint64_t> alone_{0};
  std::atomic<std::uint32_t> signal_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex callers_;
  std::vector<std::thread> workers_;
};

template <class F>
void parallel_for(Pool& pool, std::int64_t chunks, F&& body) {
  pool.run(chunks, [](void* context, std::int64_t chunk) { (*static_cast<F*>(context))(chunk); }, &body);
}

}  // namespace coterie
