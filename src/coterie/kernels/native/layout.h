// Arithmetic of the packed layout (matrix.h): sizes, places of rows, conversions of scalars. All of it is static: each
// ISA level compiles its own copy, none may be linked into another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "matrix.h"

namespace coterie {

static inline std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

static inline bool is_integer(Kind kind) { return kind >= Kind::int8; }
static inline bool is_affine(Kind kind) { return kind == Kind::affine4 || kind == Kind::affine8; }
static inline bool is_nibble(Kind kind) { return kind == Kind::code4 || kind == Kind::affine4; }
static inline bool is_scaled(Kind kind) { return kind >= Kind::fp8; }

static inline std::int64_t scale_bytes(ScaleType type) { return type == ScaleType::f32 ? 4 : type == ScaleType::e8m0 ? 1 : 2; }

// Whether the table is consecutive integers, as that of int4: a code is then a number itself.
static inline bool is_even(const Format& format) {
  bool even = true;
  for (int i = 1; i < 16; ++i) even = even && format.table[i] == format.table[0] + i;
  return even;
}

// What the number that kernels multiply for a code exceeds its integer by, negated; 1 for affine kinds, whose
// correction is a float.
static inline std::int32_t zero_of(const Format& format) {
  if (is_affine(format.kind)) return 1;
  return format.kind == Kind::code4 && is_even(format) ? format.table[0] : -128;
}

// What the sum of a group's products starts at besides its offset, as bits of the float kFloatStart = 1.5 * 2^23: read
// as a float, such a sum is kFloatStart + sum exactly, so that fma(it, s, -kFloatStart * s) is sum * s, rounded once, and
// needs no conversion. That holds where sums stay below 2^22 and kFloatStart * s is exact: short groups, f16 scales (of
// which an infinite one gives NaN). Else 0.
inline constexpr std::int32_t kFloatBits = 0x4b400000;
inline constexpr float kFloatStart = 12582912.0f;

static inline std::int32_t start_of(const Format& format) {
  const bool is_short = format.group > 0 && format.group <= 256;
  return is_short && !is_affine(format.kind) && format.scale == ScaleType::f16 ? kFloatBits : 0;
}

// Columns that the codes of a matrix (and int8 activations for it) are padded to.
static inline std::int64_t padded_cols(Kind kind, std::int64_t cols) {
  return round_up(cols, kind == Kind::f32 ? 1 : kind == Kind::bf16 ? 32 : 64);
}

// Bytes from one row of narrow activations to the next: an odd number of cache lines, so that the rows of a tile do not
// compete for a few sets of the first cache.
static inline std::int64_t input_stride(Kind kind, std::int64_t cols) {
  return (padded_cols(kind, cols) * (kind == Kind::bf16 ? 2 : 1) / 64 | 1) * 64;
}

static inline std::int64_t code_bytes(Kind kind, std::int64_t cols) {
  const std::int64_t values = kPanel * padded_cols(kind, cols);
  return kind == Kind::f32 ? values * 4 : kind == Kind::bf16 ? values * 2 : is_nibble(kind) ? values / 2 : values;
}

// A matrix description without data.
static inline Matrix describe(std::int64_t rows, std::int64_t cols, std::int64_t segments, const Format& format) {
  Matrix m{};
  m.rows = rows, m.cols = cols, m.format = format;
  m.segment_rows = rows / segments;
  m.segment_panels = (m.segment_rows + kPanel - 1) / kPanel;
  m.group = format.group ? format.group : padded_cols(format.kind, cols);
  m.groups = format.group ? (cols + format.group - 1) / format.group : 1;
  const std::int64_t scales = is_scaled(format.kind) ? kPanel * m.groups * scale_bytes(format.scale) : 0;
  m.scales_at = code_bytes(format.kind, cols);
  m.mins_at = m.scales_at + scales;
  m.panel_bytes = round_up(m.mins_at + (is_affine(format.kind) ? scales : 0), 64);
  return m;
}

static inline std::int64_t panels_of(const Matrix& m) { return m.rows / m.segment_rows * m.segment_panels; }
static inline std::int64_t matrix_bytes(const Matrix& m) { return panels_of(m) * m.panel_bytes; }

// Panel and lane of a row.
static inline std::int64_t panel_of(const Matrix& m, std::int64_t row) {
  return row / m.segment_rows * m.segment_panels + row % m.segment_rows / kPanel;
}
static inline std::int64_t lane_of(const Matrix& m, std::int64_t row) { return row % m.segment_rows % kPanel; }

// Nearest-even bf16; a NaN stays a NaN.
static inline std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float from_bits(std::uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

static inline float from_bf16(std::uint16_t value) { return from_bits(static_cast<std::uint32_t>(value) << 16); }

// f16 to f32 by integer arithmetic (exact, subnormals included).
static inline float from_f16(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 0x3ffu;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -magnitude : magnitude;
  }
  return from_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
}

// Nearest-even f16; overflow to infinity.
static inline std::uint16_t to_f16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const std::uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: units of 2^-24, rounded by the float adder
    const float scaled = from_bits(magnitude) + 0.5f;
    std::uint32_t rounded;
    std::memcpy(&rounded, &scaled, 4);
    return static_cast<std::uint16_t>(sign | (rounded - 0x3f000000u));
  }
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

static inline float e4m3_value(std::uint8_t code) {
  const std::uint32_t exponent = (code >> 3) & 15u, fraction = code & 7u;
  if ((code & 127u) == 127u) return from_bits(0x7fc00000u);
  const float magnitude = exponent ? from_bits(((exponent + 120) << 23) | (fraction << 20)) : static_cast<float>(fraction) * 0.001953125f;
  return code & 128u ? -magnitude : magnitude;
}

}  // namespace coterie
