// The free list behind ScratchPool. New buffers are zeroed, so that lanes no one wrote are numbers.
#include "scratch.h"

#include <cstring>
#include <new>
#include <utility>

#include "guard.h"

namespace coterie {

namespace {

constexpr std::size_t kStep = 1 << 14;  // sizes are rounded up, so that a slightly longer call finds room
constexpr std::align_val_t kAlign{64};

}  // namespace

void ScratchPool::Lease::Free::operator()(float* data) const {
  ::operator delete(data, kAlign);
}

ScratchPool::Lease::Lease(ScratchPool& pool, std::int64_t floats) : pool_(pool) {
  const auto needed = static_cast<std::size_t>(floats);
  if (needed == 0) return;
  {
    const std::lock_guard<std::mutex> guard(pool_.mutex_);
    auto& free = pool_.free_;
    // The smallest that fits, else the largest, which then grows.
    auto best = free.end();
    for (auto it = free.begin(); it != free.end(); ++it) {
      const bool fits = it->floats >= needed, had = best != free.end() && best->floats >= needed;
      const bool larger = best == free.end() || it->floats > best->floats;
      if (fits != had ? fits : larger != fits) best = it;
    }
    if (best != free.end()) {
      buffer_ = std::move(*best);
      free.erase(best);
    }
  }
  if (buffer_.data && buffer_.floats >= needed) {
    forbid(buffer_.data.get() + needed, (buffer_.floats - needed) * sizeof(float));
    return;
  }
  const std::size_t size = (needed + kStep - 1) / kStep * kStep;
  buffer_.data.reset();
  buffer_.data.reset(static_cast<float*>(::operator new(size * sizeof(float), kAlign)));
  buffer_.floats = size;
  std::memset(buffer_.data.get(), 0, size * sizeof(float));
  forbid(buffer_.data.get() + needed, (size - needed) * sizeof(float));
}

ScratchPool::Lease::~Lease() {
  if (!buffer_.data) return;
  allow(buffer_.data.get(), buffer_.floats * sizeof(float));
  const std::lock_guard<std::mutex> guard(pool_.mutex_);
  pool_.free_.push_back(std::move(buffer_));
}

}  // namespace coterie
