// ScratchPool: float buffers that ops borrow for a call or a task and give back, so that a step allocates nothing once
// it has run before. As many exist as were ever borrowed at once; each keeps the largest size asked of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace coterie {

class ScratchPool {
 public:
  // A borrowed buffer; given back when it goes.
  class Lease {
   public:
    Lease(ScratchPool& pool, std::int64_t floats);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    float* data() const { return buffer_.data.get(); }

   private:
    friend class ScratchPool;
    struct Free {
      void operator()(float* data) const;
    };
    struct Buffer {
      std::unique_ptr<float[], Free> data;
      std::size_t floats = 0;
    };

    ScratchPool& pool_;
    Buffer buffer_;
  };

 private:
  std::mutex mutex_;
  std::vector<Lease::Buffer> free_;
};

}  // namespace coterie
