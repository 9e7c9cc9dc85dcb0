// Bank: `count` matrices of one format, a view of an arena. Banks that are allocated together (gate_up and down of a
// layer's experts) interleave: matrix i of each of them makes unit i, one contiguous range that starts on 4 KiB and can
// be read, checked or moved as a whole. Not here: arithmetic (kernels.cpp), threads (ops.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "arena.h"
#include "layout.h"

namespace coterie {

inline constexpr std::int64_t kUnitAlignment = 4096;

// Rows of one matrix as codes: [n, cols] unpacked codes (nibbles one to a byte), scales and mins [n, groups].
struct CodeRows {
  const std::uint8_t* codes;
  const float* scales;
  const float* mins;
};

class Bank {
 public:
  Bank(std::shared_ptr<Arena> arena, std::int64_t offset, std::int64_t unit_bytes, std::int64_t count,
       const Matrix& shape);

  std::int64_t count() const { return count_; }
  std::int64_t rows() const { return shape_.rows; }
  std::int64_t cols() const { return shape_.cols; }
  std::int64_t segments() const { return shape_.rows / shape_.segment_rows; }
  Kind kind() const { return shape_.format.kind; }
  const Matrix& shape() const { return shape_; }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  std::int64_t unit_bytes() const { return unit_bytes_; }
  std::int64_t bytes() const { return matrix_bytes(shape_) * count_; }
  Matrix matrix(std::int64_t index) const {
    Matrix m = shape_;
    m.data = at(index);
    return m;
  }

  // Packs the rows among [row, row + n) that fall into `panel`; values[0] belongs to `row`. f32, bf16 banks.
  void pack_panel(std::int64_t index, std::int64_t panel, std::int64_t row, std::int64_t n, const float* values);
  void pack_panel(std::int64_t index, std::int64_t panel, std::int64_t row, std::int64_t n, const std::uint16_t* bits);
  // The same for one row of codes of a scaled kind.
  void pack_codes(std::int64_t index, std::int64_t row, const CodeRows& values);
  // One row of a matrix as f32.
  void unpack_row(std::int64_t index, std::int64_t row, float* out) const;

 private:
  unsigned char* at(std::int64_t index) const { return arena_->data() + offset_ + unit_bytes_ * index; }
  template <class T>
  void pack(std::int64_t index, std::int64_t panel, std::int64_t row, std::int64_t n, const T* values);

  std::shared_ptr<Arena> arena_;
  std::int64_t offset_, unit_bytes_, count_;
  Matrix shape_;
};

// Banks that share units: one arena for `count` units of the given matrices.
std::vector<Bank> allocate_units(std::int64_t count, const std::vector<Matrix>& shapes);

}  // namespace coterie
