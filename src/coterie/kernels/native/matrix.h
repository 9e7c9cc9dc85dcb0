// Matrix: one packed weight matrix as kernels see it. No code here: this header is compiled for every ISA level.
//
// A panel holds kPanel consecutive outputs (rows of W) as [cols][kPanel]; see bank.h.
#pragma once

#include <cstdint>

namespace coterie {

inline constexpr int kPanel = 32;

enum class Kind : int { f32, bf16 };

// One packed matrix of a bank.
struct Matrix {
  const void* data;
  std::int64_t rows;
  std::int64_t cols;
  Kind kind;
};

}  // namespace coterie
