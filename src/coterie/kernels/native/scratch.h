// Scratch: working memory of one call or task, borrowed from the device's ScratchPool and given back when it goes, so
// that a step allocates nothing once it has run before. Not zeroed; what is taken holds anything.
//
// Ops follow one another, so a pool holds what the hungriest of them had at once, not what all of them ever asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>

#include "guard.h"

namespace coterie {

class ScratchPool {
 public:
  // A piece of memory that starts on a cache line, and how much of it is taken.
  struct Buffer {
    struct Free {
      void operator()(unsigned char* data) const;
    };
    std::unique_ptr<unsigned char[], Free> data;
    std::size_t size = 0, used = 0;
  };
  using Buffers = std::list<Buffer>;

  // Moves a buffer of at least so many bytes to the front of `to`.
  void borrow(std::size_t bytes, Buffers& to);
  void give_back(Buffers& from);

 private:
  std::mutex mutex_;
  Buffers free_;
};

class Scratch {
 public:
  explicit Scratch(ScratchPool& pool) : pool_(pool) {}
  ~Scratch() {
    if (!buffers_.empty()) pool_.give_back(buffers_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Room for `count` values, aligned to 64 bytes, with a border behind that no one may touch.
  template <class T>
  T* take(std::int64_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T), whole = (bytes + 127) / 64 * 64;
    ScratchPool::Buffer& buffer = with_room(whole);
    T* place = reinterpret_cast<T*>(buffer.data.get() + buffer.used);
    buffer.used += whole;
    allow(place, bytes);
    spoil(place, bytes);
    return place;
  }

 private:
  ScratchPool::Buffer& with_room(std::size_t bytes) {
    for (ScratchPool::Buffer& buffer : buffers_) {
      if (buffer.used + bytes <= buffer.size) return buffer;
    }
    pool_.borrow(bytes, buffers_);
    return buffers_.front();
  }

  ScratchPool& pool_;
  ScratchPool::Buffers buffers_;
};

}  // namespace coterie
