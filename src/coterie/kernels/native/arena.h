// Arena: zeroed memory for weights, in huge pages where the system grants them, spread over NUMA nodes if there are
// several. Memory is touched only when written. Not here: what lies in it (bank.h).
#pragma once

#include <cstddef>

namespace coterie {

class Arena {
 public:
  explicit Arena(std::size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  unsigned char* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_, mapped_;
  unsigned char* base_;
  unsigned char* data_;
};

}  // namespace coterie
