// Workspace: working memory of one call, kept by the calling thread for the next. Not zeroed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "guard.h"

namespace coterie {

class Workspace {
 public:
  // The calling thread's own, empty: what an earlier call took is given up.
  static Workspace& fresh() {
    thread_local Workspace space;
    space.reset();
    return space;
  }

  // Room for `count` values, aligned to 64 bytes, until the next fresh().
  template <class T>
  T* take(std::int64_t count) {
    const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(T) + 127) / 64 * 64;
    if (blocks_.empty() || used_ + bytes > size_) {
      size_ = bytes > kBlock ? bytes : kBlock;
      add_block();
      total_ += size_;
      used_ = 0;
    }
    const auto base = (reinterpret_cast<std::uintptr_t>(blocks_.back().get()) + 63) / 64 * 64;
    T* place = reinterpret_cast<T*>(base + used_);
    allow(place, static_cast<std::size_t>(count) * sizeof(T));
    used_ += bytes;
    return place;
  }

 private:
  static constexpr std::size_t kBlock = std::size_t{1} << 20;

  // Several blocks become one of their total size, so that repeated calls settle on a single allocation.
  void reset() {
    if (blocks_.size() > 1) {
      blocks_.clear();
      size_ = total_;
      add_block();
    } else if (!blocks_.empty()) {
      forbid(blocks_.back().get(), size_ + 64);
    }
    used_ = 0;
  }

  void add_block() {
    blocks_.emplace_back(new unsigned char[size_ + 64]);
    forbid(blocks_.back().get(), size_ + 64);
  }

  std::vector<std::unique_ptr<unsigned char[]>> blocks_;
  std::size_t size_ = 0, used_ = 0, total_ = 0;
};

}  // namespace coterie
