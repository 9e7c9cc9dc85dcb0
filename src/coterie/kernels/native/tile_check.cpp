// Small products with made-up numbers: 41 rows, one and a half tile blocks, against the same rows one by one.
#include "tile_check.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "layout.h"

namespace coterie {

namespace {

constexpr std::int64_t kRows = 41, kCols = 192, kOutputs = 64;

// A repeatable sequence of 32-bit numbers.
class Numbers {
 public:
  std::uint32_t next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<std::uint32_t>(state_ >> 33);
  }
  // In [0.5, 1.5).
  float value() { return 0.5f + static_cast<float>(next() & 0xffffu) / 65536.0f; }
  std::uint16_t bf16() { return to_bf16((next() & 1u ? -1.0f : 1.0f) * value()); }

 private:
  std::uint64_t state_ = 1;
};

struct Case {
  const char* name;
  Kind kind;
  std::int64_t group;
  bool even;
};

constexpr Case kCases[] = {
    {"bf16", Kind::bf16, 0, false},
    {"int8 g128", Kind::int8, 128, false},
    {"int8 g16", Kind::int8, 16, false},
    {"int8 row", Kind::int8, 0, false},
    {"int4 g32", Kind::code4, 32, true},
    {"table g64", Kind::code4, 64, false},
    {"affine4 g32", Kind::affine4, 32, false},
    {"affine8 g64", Kind::affine8, 64, false},
};

// Inputs of one case: weights, activations, and room behind the rows for whole tiles.
struct Inputs {
  explicit Inputs(const Case& c) {
    Numbers numbers;
    Format format{c.kind, c.group, ScaleType::f32, {}};
    for (int i = 0; i < 16; ++i) format.table[i] = static_cast<std::int8_t>(c.even ? i - 8 : i * i - 100);
    weight = describe(kOutputs, kCols, 1, format);
    const bool bf16 = c.kind == Kind::bf16;
    memory.resize(static_cast<std::size_t>(matrix_bytes(weight)) + 64);
    unsigned char* data = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64);
    for (std::int64_t i = 0; i < matrix_bytes(weight); ++i) data[i] = static_cast<unsigned char>(numbers.next());
    for (std::int64_t p = 0; p < panels_of(weight); ++p) {
      unsigned char* panel = data + p * weight.panel_bytes;
      for (std::int64_t i = 0; bf16 && i < weight.scales_at; i += 2) put(panel + i, numbers.bf16());
      for (std::int64_t i = weight.scales_at; !bf16 && i < weight.panel_bytes; i += 4) put(panel + i, numbers.value());
    }
    weight.data = data;
    const std::int64_t stride = input_stride(c.kind, kCols), group = c.group ? kActivationGroup : kCols;
    codes.resize(static_cast<std::size_t>((kRows + kTileSlack) * stride));
    for (std::size_t i = 0; i < codes.size(); i += 2) {
      if (bf16) put(codes.data() + i, numbers.bf16());
      else put(codes.data() + i, static_cast<std::uint16_t>(numbers.next()));
    }
    for (std::int64_t i = 0; i < kRows * 2; ++i) scales.push_back(numbers.value());
    if (!bf16) add_sums(stride);
    activations = {codes.data(), scales.data(), sums.data(), stride, group, (kCols + group - 1) / group};
  }

  // Of the codes of each row and scale group, as kernels take them.
  void add_sums(std::int64_t stride) {
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int64_t first = 0; first < kCols; first += weight.group) {
        const std::int8_t* x = codes.data() + row * stride;
        const std::int32_t sum = std::accumulate(x + first, x + std::min(kCols, first + weight.group), 0);
        sums.push_back(start_of(weight.format) + zero_of(weight.format) * sum);
      }
    }
  }

  template <class To, class Value>
  static void put(To* place, Value value) {
    std::memcpy(place, &value, sizeof value);
  }

  Matrix weight;
  std::vector<unsigned char> memory;
  std::vector<std::int8_t> codes;
  std::vector<float> scales;
  std::vector<std::int32_t> sums;
  Activations activations;
};

void multiply(const KernelTable& table, const Inputs& in, std::int64_t row, std::int64_t rows, float* out) {
  table.gemm({nullptr, 0, rows_from(in.activations, row, in.weight.groups), in.weight, nullptr, out + row * kOutputs,
              kOutputs, rows, 0, panels_of(in.weight)});
}

}  // namespace

std::string differing_kind(const KernelTable& table) {
  for (const Case& c : kCases) {
    if (c.kind == Kind::bf16 && !table.bf16_inputs) continue;
    const Inputs in(c);
    std::vector<float> together(kRows * kOutputs), single(kRows * kOutputs);
    multiply(table, in, 0, kRows, together.data());
    for (std::int64_t row = 0; row < kRows; ++row) multiply(table, in, row, 1, single.data());
    if (std::memcmp(together.data(), single.data(), together.size() * sizeof(float)) != 0) return c.name;
  }
  return {};
}

}  // namespace coterie
