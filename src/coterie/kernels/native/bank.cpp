// Packing and unpacking by the layout of matrix.h.
#include "bank.h"

#include <algorithm>

namespace coterie {

namespace {

// Offset in elements of (column, lane) in a panel of f32 or bf16.
template <class T>
std::int64_t element_at(std::int64_t col, std::int64_t lane) {
  if constexpr (sizeof(T) == 4) return col * kPanel + lane;
  return (col / 2 * kPanel + lane) * 2 + col % 2;
}

template <class T>
T narrow(float value) {
  if constexpr (sizeof(T) == 4) return value;
  else return to_bf16(value);
}
template <class T>
T narrow(std::uint16_t bits) {
  if constexpr (sizeof(T) == 4) return from_bf16(bits);
  else return bits;
}

// Transposes `n` rows into lanes [lane, lane + n) of a panel, a few columns at a time to stay in cache.
template <class T, class S>
void transpose(T* panel, std::int64_t lane, std::int64_t n, std::int64_t cols, const S* values) {
  constexpr std::int64_t kStep = 16;
  for (std::int64_t k0 = 0; k0 < cols; k0 += kStep) {
    const std::int64_t k1 = std::min(cols, k0 + kStep);
    for (std::int64_t r = 0; r < n; ++r) {
      for (std::int64_t k = k0; k < k1; ++k) panel[element_at<T>(k, lane + r)] = narrow<T>(values[r * cols + k]);
    }
  }
}

void store_scale(unsigned char* table, std::int64_t index, ScaleType type, float value) {
  const std::uint16_t half = type == ScaleType::f16 ? to_f16(value) : to_bf16(value);
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (type == ScaleType::f32) std::memcpy(table + index * 4, &value, 4);
  else if (type == ScaleType::e8m0) table[index] = static_cast<unsigned char>(value == value ? bits >> 23 : 255);
  else std::memcpy(table + index * 2, &half, 2);
}

float load_scale(const unsigned char* table, std::int64_t index, ScaleType type) {
  float value;
  std::uint16_t half;
  std::memcpy(&half, table + index * 2 * (type == ScaleType::f16 || type == ScaleType::bf16), 2);
  if (type == ScaleType::f16) return from_f16(half);
  if (type == ScaleType::bf16) return from_bf16(half);
  if (type == ScaleType::e8m0) return table[index] == 255 ? from_bits(0x7fc00000u) : from_bits(static_cast<std::uint32_t>(table[index]) << 23);
  std::memcpy(&value, table + index * 4, 4);
  return value;
}

// Byte of a code and whether it is the high nibble.
std::int64_t code_at(Kind kind, std::int64_t col, std::int64_t lane) {
  if (is_nibble(kind)) return col / 4 * 64 + lane % 16 * 4 + col % 4;
  return col / 4 * 128 + lane * 4 + col % 4;
}

float code_value(const Format& format, std::uint8_t code, float scale, float min) {
  switch (format.kind) {
    case Kind::fp8: return scale * e4m3_value(code);
    case Kind::int8: return scale * static_cast<float>(static_cast<int>(code) - 128);
    case Kind::code4: return scale * static_cast<float>(format.table[code]);
    default: return scale * static_cast<float>(code) - min;
  }
}

}  // namespace

Bank::Bank(std::shared_ptr<Arena> arena, std::int64_t offset, std::int64_t unit_bytes, std::int64_t count,
           const Matrix& shape)
    : arena_(std::move(arena)), offset_(offset), unit_bytes_(unit_bytes), count_(count), shape_(shape) {}

std::vector<Bank> allocate_units(std::int64_t count, const std::vector<Matrix>& shapes) {
  std::int64_t unit = 0;
  for (const Matrix& shape : shapes) unit += matrix_bytes(shape);
  unit = round_up(unit, kUnitAlignment);
  auto arena = std::make_shared<Arena>(static_cast<std::size_t>(unit * count));
  std::vector<Bank> banks;
  std::int64_t offset = 0;
  for (const Matrix& shape : shapes) {
    banks.emplace_back(arena, offset, unit, count, shape);
    offset += matrix_bytes(shape);
  }
  return banks;
}

template <class T>
void Bank::pack(std::int64_t index, std::int64_t panel, std::int64_t row, std::int64_t n, const T* values) {
  const std::int64_t segment = panel / shape_.segment_panels;
  const std::int64_t first = segment * shape_.segment_rows + panel % shape_.segment_panels * kPanel;
  const std::int64_t begin = std::max(row, first);
  const std::int64_t end = std::min({row + n, first + kPanel, (segment + 1) * shape_.segment_rows});
  if (begin >= end) return;
  unsigned char* target = at(index) + panel * shape_.panel_bytes;
  const T* source = values + (begin - row) * shape_.cols;
  if (kind() == Kind::f32) {
    transpose(reinterpret_cast<float*>(target), begin - first, end - begin, shape_.cols, source);
  } else {
    transpose(reinterpret_cast<std::uint16_t*>(target), begin - first, end - begin, shape_.cols, source);
  }
}

void Bank::pack_panel(std::int64_t index, std::int64_t panel, std::int64_t row, std::int64_t n, const float* values) {
  pack(index, panel, row, n, values);
}

void Bank::pack_panel(std::int64_t index, std::int64_t panel, std::int64_t row, std::int64_t n,
                      const std::uint16_t* bits) {
  pack(index, panel, row, n, bits);
}

void Bank::pack_codes(std::int64_t index, std::int64_t row, const CodeRows& values) {
  unsigned char* panel = at(index) + panel_of(shape_, row) * shape_.panel_bytes;
  const std::int64_t lane = lane_of(shape_, row);
  const bool nibble = is_nibble(kind());
  const std::uint32_t kept = lane < 16 ? 0xf0f0f0f0u : 0x0f0f0f0fu;
  unsigned char* const first = panel + code_at(kind(), 0, lane);
  const std::int64_t step = code_at(kind(), 4, lane) - code_at(kind(), 0, lane);
  const auto put = [&](std::int64_t k, std::size_t n) {
    unsigned char* place = first + k / 4 * step;
    std::uint32_t four = 0, there = 0;
    std::memcpy(&four, values.codes + k, n);
    if (nibble) {
      std::memcpy(&there, place, n);
      four = (there & kept) | (lane < 16 ? four : four << 4);
    }
    std::memcpy(place, &four, n);
  };
  // Whole quads apart: a copy of a fixed size is one instruction.
  const std::int64_t whole = shape_.cols / 4 * 4;
  for (std::int64_t k = 0; k < whole; k += 4) put(k, 4);
  if (whole < shape_.cols) put(whole, static_cast<std::size_t>(shape_.cols - whole));
  for (std::int64_t g = 0; g < shape_.groups; ++g) {
    store_scale(panel + shape_.scales_at, g * kPanel + lane, shape_.format.scale, values.scales[g]);
    if (is_affine(kind())) store_scale(panel + shape_.mins_at, g * kPanel + lane, shape_.format.scale, values.mins[g]);
  }
}

void Bank::unpack_row(std::int64_t index, std::int64_t row, float* out) const {
  const unsigned char* panel = at(index) + panel_of(shape_, row) * shape_.panel_bytes;
  const std::int64_t lane = lane_of(shape_, row);
  if (kind() == Kind::f32) {
    const float* source = reinterpret_cast<const float*>(panel);
    for (std::int64_t k = 0; k < shape_.cols; ++k) out[k] = source[element_at<float>(k, lane)];
    return;
  }
  if (kind() == Kind::bf16) {
    const std::uint16_t* source = reinterpret_cast<const std::uint16_t*>(panel);
    for (std::int64_t k = 0; k < shape_.cols; ++k) out[k] = from_bf16(source[element_at<std::uint16_t>(k, lane)]);
    return;
  }
  for (std::int64_t g = 0, k = 0; g < shape_.groups; ++g) {
    const float scale = load_scale(panel + shape_.scales_at, g * kPanel + lane, shape_.format.scale);
    const float min = is_affine(kind()) ? load_scale(panel + shape_.mins_at, g * kPanel + lane, shape_.format.scale) : 0.0f;
    for (const std::int64_t end = std::min(shape_.cols, (g + 1) * shape_.group); k < end; ++k) {
      const unsigned char byte = panel[code_at(kind(), k, lane)];
      const std::uint8_t code = !is_nibble(kind()) ? byte : lane < 16 ? byte & 15 : byte >> 4;
      out[k] = code_value(shape_.format, code, scale, min);
    }
  }
}

}  // namespace coterie
