// Matrix: one packed weight matrix as kernels see it, and the layout that every product reads. No code that could be
// emitted for one ISA level and linked into another: this header is compiled for every level.
//
// A panel holds kPanel consecutive outputs (rows of W); segments of a matrix (gate, up) each start a panel. A panel is
// codes, then scales [groups][32], then mins [groups][32], padded to 64 bytes. Codes, columns padded with zeros:
//   f32     [cols][32]
//   bf16    [cols/2][32][2]          cols to a multiple of 32; a row pair of 16 outputs is a row of an AMX tile
//   bytes   [cols/4][32][4]          cols to a multiple of 64: fp8, int8 (w = s (u - 128)), affine8 (w = s u - m)
//   nibbles [cols/4][16][4]          low nibble output i, high nibble output 16 + i: code4 (w = s table[u]), affine4
// The layout is the same at every ISA level; it is what packed checkpoints hold (layout version 1).
#pragma once

#include <cstdint>

namespace coterie {

inline constexpr int kPanel = 32;
// Activations of integer kinds have a scale for each group of the weights, of 32 columns at least; the whole row where
// weights are scaled by row. kActivationGroup is a multiple of every such group: the step in which an expert's inner
// columns are computed and quantised.
inline constexpr std::int64_t kLeastActivationGroup = 32;
inline constexpr std::int64_t kActivationGroup = 128;

enum class Kind : int { f32, bf16, fp8, int8, code4, affine4, affine8 };
enum class ScaleType : int { f32, f16, bf16, e8m0 };

struct Format {
  Kind kind = Kind::f32;
  std::int64_t group = 0;  // 16, 32, 64, 128; 0: the whole row
  ScaleType scale = ScaleType::f32;
  std::int8_t table[16] = {};
};

// One packed matrix of a bank.
struct Matrix {
  const unsigned char* data;
  std::int64_t rows, cols;
  std::int64_t segment_rows, segment_panels;
  std::int64_t panel_bytes, scales_at, mins_at;  // within a panel
  std::int64_t group, groups;                    // group in columns, never 0
  Format format;
};

}  // namespace coterie
