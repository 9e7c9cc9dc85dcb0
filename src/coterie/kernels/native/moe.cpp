// The fused feed-forward of a step on one rank: sort, gather, experts (routed and shared side by side), combine, in one
// call. Meaning and bits are those of the single ops (docs/design.md); each token is quantised once, not once per
// expert.
#include <algorithm>
#include <cstring>

#include "ops.h"

namespace coterie {

namespace {

bool same_inputs(const Matrix& a, const Matrix& b) {
  return is_integer(a.format.kind) == is_integer(b.format.kind) &&
         (a.format.kind == Kind::bf16) == (b.format.kind == Kind::bf16) && a.cols == b.cols && a.group == b.group &&
         zero_of(a.format) == zero_of(b.format) && start_of(a.format) == start_of(b.format);
}

// What is alive at once of a long step: gathered rows, and floats of the experts' outputs. Both bound memory, and leave
// tasks enough for all threads between two waits.
constexpr std::int64_t kGatheredRows = 2048;
constexpr std::int64_t kOutputFloats = 1 << 22;
constexpr std::int64_t kLeastColumns = 256;

}  // namespace

// Rows of x, or of its int8 codes, in the order of `token`.
Gathered Device::gather(const float* x, const Activations& q, const Matrix& weight, const std::int64_t* token,
                        std::int64_t pairs, Scratch& space) {
  if (!q.codes) {
    float* rows = space.take<float>(pairs * weight.cols);
    over_rows(pairs, weight.cols / 4, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        std::memcpy(rows + i * weight.cols, x + token[i] * weight.cols, sizeof(float) * static_cast<std::size_t>(weight.cols));
      }
    });
    return {rows, {}};
  }
  auto* codes = space.take<std::int8_t>((pairs + kTileSlack) * q.stride);
  float* scales = q.scales ? space.take<float>(pairs * q.groups) : nullptr;
  std::int32_t* sums = q.sums ? space.take<std::int32_t>(pairs * weight.groups) : nullptr;
  over_rows(pairs, q.stride / 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      std::memcpy(codes + i * q.stride, q.codes + token[i] * q.stride, static_cast<std::size_t>(q.stride));
      if (!q.scales) continue;
      std::memcpy(scales + i * q.groups, q.scales + token[i] * q.groups, 4 * static_cast<std::size_t>(q.groups));
      std::memcpy(sums + i * weight.groups, q.sums + token[i] * weight.groups, 4 * static_cast<std::size_t>(weight.groups));
    }
  });
  return {nullptr, {codes, scales, sums, q.stride, q.group, q.groups}};
}

void Device::route(const float* x, const Bank& gate, RouteArgs args, std::int64_t rows) {
  Scratch space(scratch_);
  args.scores = space.take<float>(rows * args.experts);
  args.biased = space.take<float>(rows * args.experts);
  args.group_scores = space.take<float>(rows * args.groups);
  run_products({{x, gate.cols(), gate.matrix(0), nullptr, args.scores, args.experts, rows}}, space);
  const std::int64_t cost = args.experts * (args.top_k + 8);
  over_rows(rows, cost, [&](std::int64_t begin, std::int64_t end) { table_.route(args, begin, end); });
}

void Device::moe(const MoeArgs& args) {
  Scratch space(scratch_);
  const Bank& gate_up = *args.gate_up;
  const Matrix& shape = gate_up.shape();
  const std::int64_t pairs = args.tokens * args.top_k, hidden = gate_up.cols();
  auto* token = space.take<std::int64_t>(pairs);
  auto* position = space.take<std::int64_t>(pairs);
  sort_pairs(args.ids, args.tokens, args.top_k, gate_up.count(), token, position, args.counts);
  const Activations q = quantize(args.x, hidden, args.tokens, shape, space);
  std::vector<ExpertRun> runs;
  if (args.shared_gate_up) {
    const Matrix gate = args.shared_gate_up->matrix(0);
    const Activations own = same_inputs(gate, shape) ? q : quantize(args.x, hidden, args.tokens, gate, space);
    runs.push_back({gate, args.shared_down->matrix(0), args.x, own, nullptr, 0, args.tokens});
  }
  std::size_t next = runs.size(), begin = 0;
  for (std::int64_t e = 0; e < gate_up.count(); ++e) {
    if (args.counts[e]) runs.push_back({gate_up.matrix(e), args.down->matrix(e), nullptr, {}, nullptr, 0, args.counts[e]});
  }
  std::vector<Inner> inners;
  for (std::int64_t row = 0; begin < runs.size(); begin = next) {
    std::int64_t rows = 0;
    const std::size_t first = next;
    while (next < runs.size() && (rows == 0 || rows + runs[next].rows <= kGatheredRows)) rows += runs[next++].rows;
    Scratch brief(scratch_);
    const Gathered sorted = gather(args.x, q, shape, token + row, rows, brief);
    for (std::size_t i = first, at = 0; i < next; at += static_cast<std::size_t>(runs[i++].rows)) {
      const auto offset = static_cast<std::int64_t>(at);
      runs[i].x = sorted.rows ? sorted.rows + offset * hidden : nullptr;
      runs[i].quantized = rows_from(sorted.quantized, offset, shape.groups);
    }
    run_gates(std::span(runs).subspan(begin, next - begin), inners, space, brief);
    row += rows;
  }
  run_down_columns(args, runs, inners, position, space);
}

// Down and the sum over a token's experts, some columns after the others: weights are still read once.
void Device::run_down_columns(const MoeArgs& args, std::vector<ExpertRun>& runs, const std::vector<Inner>& inners,
                              const std::int64_t* position, Scratch& space) {
  const std::int64_t width = args.down->rows(), pairs = args.tokens * args.top_k;
  const std::int64_t lines = pairs + (args.shared_down ? args.tokens : 0);
  const std::int64_t fitting = kOutputFloats / std::max<std::int64_t>(1, lines) / kPanel * kPanel;
  const std::int64_t step = std::min(width, std::max(kLeastColumns, fitting));
  float* outputs = space.take<float>(lines * step);
  float* gate = nullptr;
  if (args.shared_gate) {
    const std::int64_t hidden = args.shared_gate->cols();
    gate = space.take<float>(args.tokens);
    run_products({{args.x, hidden, args.shared_gate->matrix(0), nullptr, gate, 1, args.tokens}}, space);
  }
  for (std::int64_t first = 0; first < width; first += step) {
    const std::int64_t columns = std::min(step, width - first);
    float* shared = args.shared_down ? outputs + pairs * columns : nullptr;
    float* target = outputs;
    for (std::size_t i = shared ? 1 : 0; i < runs.size(); target += runs[i++].rows * columns) {
      runs[i].out = target - first, runs[i].out_stride = columns;
    }
    if (shared) runs[0].out = shared - first, runs[0].out_stride = columns;
    run_downs(runs, inners, {first / kPanel, (first + columns + kPanel - 1) / kPanel});
    if (gate) sigmoid_scale(shared, gate, shared, args.tokens, columns);
    combine({outputs, args.sums, position, args.weights, shared, args.out + first, columns, width, args.top_k},
            args.tokens);
  }
}

}  // namespace coterie
