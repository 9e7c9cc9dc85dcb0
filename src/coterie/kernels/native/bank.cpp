// Storage and packing of banks. Memory comes zeroed from the system and is touched only when filled; large banks ask
// for huge pages.
#include "bank.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

namespace coterie {

namespace {

std::size_t matrix_stride(std::int64_t rows, std::int64_t cols, Kind kind) {
  const auto panels = static_cast<std::size_t>((rows + kPanel - 1) / kPanel);
  const std::size_t bytes = panels * kPanel * static_cast<std::size_t>(cols) * element_bytes(kind);
  return (bytes + 63) / 64 * 64;
}

template <class T>
T narrow(float value);
template <>
float narrow<float>(float value) {
  return value;
}
template <>
std::uint16_t narrow<std::uint16_t>(float value) {
  return to_bf16(value);
}

// Transposes `n` rows of `values` into lanes [lane, lane + n) of a panel, a few columns at a time to stay in cache.
template <class T>
void pack(T* panel, std::int64_t lane, std::int64_t n, std::int64_t cols, const float* values) {
  constexpr std::int64_t kStep = 16;
  for (std::int64_t k0 = 0; k0 < cols; k0 += kStep) {
    const std::int64_t k1 = std::min(cols, k0 + kStep);
    for (std::int64_t r = 0; r < n; ++r) {
      for (std::int64_t k = k0; k < k1; ++k) panel[k * kPanel + lane + r] = narrow<T>(values[r * cols + k]);
    }
  }
}

}  // namespace

Bank::Bank(std::int64_t count, std::int64_t rows, std::int64_t cols, Kind kind)
    : count_(count), rows_(rows), cols_(cols), kind_(kind), stride_(matrix_stride(rows, cols, kind)) {
  mapped_ = std::max<std::size_t>(bytes(), 64);
  void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (mapped_ >= (std::size_t{1} << 22)) madvise(memory, mapped_, MADV_HUGEPAGE);
#endif
  data_ = static_cast<char*>(memory);
}

Bank::~Bank() {
  munmap(data_, mapped_);
}

void Bank::pack_panel(std::int64_t index, std::int64_t panel, std::int64_t row, std::int64_t n, const float* values) {
  const std::int64_t begin = std::max(row, panel * kPanel);
  const std::int64_t end = std::min(row + n, (panel + 1) * kPanel);
  if (begin >= end) return;
  const std::int64_t lane = begin - panel * kPanel;
  const float* source = values + (begin - row) * cols_;
  if (kind_ == Kind::f32) {
    pack(reinterpret_cast<float*>(at(index)) + panel * kPanel * cols_, lane, end - begin, cols_, source);
  } else {
    pack(reinterpret_cast<std::uint16_t*>(at(index)) + panel * kPanel * cols_, lane, end - begin, cols_, source);
  }
}

void Bank::unpack_row(std::int64_t index, std::int64_t row, float* out) const {
  const std::int64_t start = row / kPanel * kPanel * cols_ + row % kPanel;
  if (kind_ == Kind::f32) {
    const float* source = reinterpret_cast<const float*>(at(index)) + start;
    for (std::int64_t k = 0; k < cols_; ++k) out[k] = source[k * kPanel];
  } else {
    const std::uint16_t* source = reinterpret_cast<const std::uint16_t*>(at(index)) + start;
    for (std::int64_t k = 0; k < cols_; ++k) out[k] = from_bf16(source[k * kPanel]);
  }
}

}  // namespace coterie
