// The free list behind Scratch: as many buffers exist as were ever borrowed at once, each of the largest size asked of
// it.
#include "scratch.h"

#include <new>
#include <utility>

namespace coterie {

namespace {

constexpr std::size_t kLeast = std::size_t{1} << 18;
constexpr std::size_t kStep = std::size_t{1} << 16;  // sizes are rounded up: a slightly longer call finds room
constexpr std::align_val_t kAlign{64};

}  // namespace

void ScratchPool::Buffer::Free::operator()(unsigned char* data) const {
  ::operator delete(data, kAlign);
}

void ScratchPool::borrow(std::size_t bytes, Buffers& to) {
  Buffers found;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    // The smallest that fits, else the largest, which then grows.
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const bool fits = it->size >= bytes, had = best != free_.end() && best->size >= bytes;
      const bool larger = best == free_.end() || it->size > best->size;
      if (fits != had ? fits : larger != fits) best = it;
    }
    if (best != free_.end()) found.splice(found.begin(), free_, best);
  }
  if (found.empty()) found.emplace_front();
  Buffer& buffer = found.front();
  if (buffer.size < bytes) {
    const std::size_t size = bytes < kLeast ? kLeast : (bytes + kStep - 1) / kStep * kStep;
    buffer.data.reset();
    buffer.size = 0;
    buffer.data.reset(static_cast<unsigned char*>(::operator new(size, kAlign)));
    buffer.size = size;
    forbid(buffer.data.get(), size);
  }
  to.splice(to.begin(), found);
}

void ScratchPool::give_back(Buffers& from) {
  for (Buffer& buffer : from) {
    forbid(buffer.data.get(), buffer.size);
    buffer.used = 0;
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  free_.splice(free_.begin(), from);
}

}  // namespace coterie
