// Bank: `count` matrices [rows, cols] packed in column panels, the layout every product of this backend reads.
//
// A panel holds kPanel consecutive outputs (rows of W) as [cols][kPanel], so that y = x W^T vectorises over outputs
// with k in order. Rows past the end of the last panel are zero. The layout does not depend on the ISA level. Elements
// are f32, or bf16 rounded to nearest even. Not here: arithmetic (kernels.cpp), threads (ops.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "matrix.h"

namespace coterie {

inline std::size_t element_bytes(Kind kind) {
  return kind == Kind::f32 ? 4 : 2;
}

class Bank {
 public:
  Bank(std::int64_t count, std::int64_t rows, std::int64_t cols, Kind kind);
  ~Bank();
  Bank(const Bank&) = delete;
  Bank& operator=(const Bank&) = delete;

  std::int64_t count() const { return count_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  Kind kind() const { return kind_; }
  std::int64_t panels() const { return (rows_ + kPanel - 1) / kPanel; }
  std::size_t bytes() const { return stride_ * static_cast<std::size_t>(count_); }
  Matrix matrix(std::int64_t index) const { return {at(index), rows_, cols_, kind_}; }

  // Packs the rows of `values` [n, cols] that fall into `panel`; `row` is the matrix row of values[0].
  void pack_panel(std::int64_t index, std::int64_t panel, std::int64_t row, std::int64_t n, const float* values);
  // One row of a matrix, widened to f32.
  void unpack_row(std::int64_t index, std::int64_t row, float* out) const;

 private:
  char* at(std::int64_t index) const { return data_ + stride_ * static_cast<std::size_t>(index); }

  std::int64_t count_, rows_, cols_;
  Kind kind_;
  std::size_t stride_;
  std::size_t mapped_;
  char* data_;
};

// Nearest-even bf16; a NaN stays a NaN.
inline std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_bf16(std::uint16_t value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

}  // namespace coterie
