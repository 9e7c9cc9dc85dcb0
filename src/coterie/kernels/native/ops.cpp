// How each op is split. Costs are rough counts of multiply-adds; a chunk below kChunk is not worth another thread.
#include "ops.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace coterie {

namespace {

constexpr std::int64_t kChunk = 1 << 15;  // multiply-adds that are worth another thread

}  // namespace

void Device::fill(Bank& bank, std::int64_t index, std::int64_t row, std::int64_t n, const float* values) {
  if (n == 0) return;
  const Matrix& shape = bank.shape();
  if (!is_scaled(bank.kind())) {
    const std::int64_t first = panel_of(shape, row), last = panel_of(shape, row + n - 1);
    parallel_for(pool_, last - first + 1, [&](std::int64_t i) { bank.pack_panel(index, first + i, row, n, values); });
    return;
  }
  over_panels(bank, row, n, [&](std::int64_t begin, std::int64_t end) {
    const QuantizeArgs args{shape.format, shape.cols, shape.group};
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(shape.cols));
    std::vector<float> scales(static_cast<std::size_t>(2 * shape.groups));
    float* mins = scales.data() + shape.groups;
    for (std::int64_t r = begin; r < end; ++r) {
      table_.quantize_row(args, values + (r - row) * shape.cols, codes.data(), scales.data(), mins);
      bank.pack_codes(index, r, {codes.data(), scales.data(), mins});
    }
  });
}

void Device::fill_bf16(Bank& bank, std::int64_t index, std::int64_t row, std::int64_t n, const std::uint16_t* bits) {
  if (n == 0) return;
  const std::int64_t first = panel_of(bank.shape(), row), last = panel_of(bank.shape(), row + n - 1);
  parallel_for(pool_, last - first + 1, [&](std::int64_t i) { bank.pack_panel(index, first + i, row, n, bits); });
}

void Device::fill_codes(Bank& bank, std::int64_t index, std::int64_t row, std::int64_t n, const CodeRows& values) {
  const Matrix& shape = bank.shape();
  over_panels(bank, row, n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t at = r - row;
      bank.pack_codes(index, r, {values.codes + at * shape.cols, values.scales + at * shape.groups,
                                 values.mins ? values.mins + at * shape.groups : nullptr});
    }
  });
}

// Calls body(begin, end) for the rows of each panel: two threads never write one byte (nibbles share bytes).
template <class F>
void Device::over_panels(const Bank& bank, std::int64_t row, std::int64_t n, F body) {
  if (n == 0) return;
  const std::int64_t first = panel_of(bank.shape(), row), last = panel_of(bank.shape(), row + n - 1);
  parallel_for(pool_, last - first + 1, [&](std::int64_t i) {
    const Matrix& shape = bank.shape();
    const std::int64_t segment = (first + i) / shape.segment_panels, within = (first + i) % shape.segment_panels;
    const std::int64_t top = segment * shape.segment_rows, start = top + within * kPanel;
    const std::int64_t begin = std::max(row, start);
    const std::int64_t end = std::min({row + n, start + kPanel, top + shape.segment_rows});
    body(begin, end);
  });
}

void Device::read(const Bank& bank, std::int64_t index, float* out) {
  over_rows(bank.rows(), bank.cols(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) bank.unpack_row(index, r, out + r * bank.cols());
  });
}

void Device::embed(const Bank& bank, const std::int32_t* ids, std::int64_t n, float* out) {
  over_rows(n, bank.cols() * 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) bank.unpack_row(0, ids[r], out + r * bank.cols());
  });
}

void Device::norm(const NormArgs& args, std::int64_t rows) {
  over_rows(rows, args.width * 2, [&](std::int64_t begin, std::int64_t end) { table_.norm(args, begin, end); });
}

void Device::mla_rows(const MlaArgs& args, std::int64_t rows) {
  const std::int64_t cost = args.heads * args.rope.dim * 2 + args.rank * 2;
  over_rows(rows, cost, [&](std::int64_t begin, std::int64_t end) { table_.mla_rows(args, begin, end); });
}

void Device::head_rows(const HeadArgs& args, std::int64_t rows) {
  const std::int64_t cost = args.heads * args.dim * 4;
  over_rows(rows, cost, [&](std::int64_t begin, std::int64_t end) { table_.head_rows(args, begin, end); });
}

void Device::combine(const CombineArgs& args, std::int64_t rows) {
  const std::int64_t cost = args.width * (args.top_k + 1);
  over_rows(rows, cost, [&](std::int64_t begin, std::int64_t end) { table_.combine(args, begin, end); });
}

void Device::narrow(const NarrowArgs& args, std::int64_t rows) {
  over_rows(rows, args.width, [&](std::int64_t begin, std::int64_t end) { table_.narrow(args, begin, end); });
}

void Device::sigmoid_scale(const float* x, const float* gate, float* out, std::int64_t rows, std::int64_t width) {
  over_rows(rows, width,
            [&](std::int64_t begin, std::int64_t end) { table_.sigmoid_scale(x, gate, out, width, begin, end); });
}

}  // namespace coterie
