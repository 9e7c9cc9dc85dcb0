// The pool's protocol. A worker claims a chunk by compare-and-swap on (epoch, next chunk); the caller closes the ticket
// before it writes the next job's fields, so that a late worker can never claim a chunk of a job it read half of.
#include "pool.h"

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace coterie {

namespace {

constexpr std::uint64_t kIndexMask = 0xffffffffu;
constexpr std::uint64_t kClosed = kIndexMask;
constexpr int kSpins = 4000;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Flushes denormals (inputs and results) in this thread while alive: the same rule in every kernel thread.
class FlushDenormals {
 public:
#if defined(__x86_64__) || defined(__i386__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (std::uint64_t{1} << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  std::uint64_t saved_;
#endif
};

}  // namespace

Pool::Pool(int threads) : ticket_(kClosed) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { loop(); });
}

Pool::~Pool() {
  stop_.store(true);
  signal_.fetch_add(1);
  signal_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

bool Pool::take(std::uint64_t& seen) {
  std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
  seen = ticket;
  const Work work = work_.load(std::memory_order_acquire);
  void* context = context_.load(std::memory_order_acquire);
  const std::uint64_t chunks = chunks_.load(std::memory_order_acquire);
  const std::uint64_t index = ticket & kIndexMask;
  if (index == kClosed || index >= chunks) return false;
  if (!ticket_.compare_exchange_strong(ticket, ticket + 1, std::memory_order_acq_rel)) return true;
  work(context, static_cast<std::int64_t>(index));
  done_.fetch_add(1, std::memory_order_acq_rel);
  return true;
}

void Pool::loop() {
  const FlushDenormals flush;
  int idle = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    const std::uint32_t signal = signal_.load();
    std::uint64_t seen = 0;
    if (take(seen)) {
      idle = 0;
    } else if (++idle < kSpins) {
      pause();
    } else {
      sleepers_.fetch_add(1);
      if (ticket_.load() == seen && !stop_.load()) signal_.wait(signal);
      sleepers_.fetch_sub(1);
      idle = 0;
    }
  }
}

void Pool::share(std::int64_t chunks, Work work, void* context) {
  const std::uint64_t epoch = (ticket_.load(std::memory_order_relaxed) | kIndexMask) + 1;
  ticket_.store(epoch | kClosed);
  work_.store(work, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  chunks_.store(static_cast<std::uint32_t>(chunks), std::memory_order_release);
  done_.store(0, std::memory_order_release);
  const std::uint64_t open = epoch + kIndexMask + 1;
  ticket_.store(open);
  signal_.fetch_add(1);
  if (sleepers_.load() > 0) signal_.notify_all();
  std::uint64_t seen = open;
  while (take(seen)) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) != static_cast<std::uint32_t>(chunks);) {
    if (++spins < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void Pool::run(std::int64_t chunks, Work work, void* context) {
  if (chunks <= 0) return;
  const FlushDenormals flush;
  if (chunks == 1 || workers_.empty()) {
    for (std::int64_t i = 0; i < chunks; ++i) {
      alone_.fetch_add(1, std::memory_order_relaxed);
      work(context, i);
    }
    return;
  }
  const std::lock_guard<std::mutex> turn(callers_);
  share(chunks, work, context);
}

}  // namespace coterie
