// The fused feed-forward of a step on one rank: sort, gather, experts (routed and shared side by side), combine, in one
// call. Meaning and bits are those of the single ops (docs/design.md); each token is quantised once, not once per
// expert.
#include <cstring>

#include "ops.h"

namespace coterie {

namespace {

bool same_inputs(const Matrix& a, const Matrix& b) {
  return is_integer(a.format.kind) == is_integer(b.format.kind) &&
         (a.format.kind == Kind::bf16) == (b.format.kind == Kind::bf16) && a.cols == b.cols && a.group == b.group &&
         zero_of(a.format) == zero_of(b.format);
}

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
  const std::int64_t pairs = args.tokens * args.top_k, hidden = gate_up.cols(), width = args.down->rows();
  auto* token = space.take<std::int64_t>(pairs);
  auto* position = space.take<std::int64_t>(pairs);
  std::int64_t* counts = args.counts;
  sort_pairs(args.ids, args.tokens, args.top_k, gate_up.count(), token, position, counts);
  const Activations q = quantize(args.x, hidden, args.tokens, shape, space);
  const Gathered sorted = gather(args.x, q, shape, token, pairs, space);
  float* outputs = space.take<float>(pairs * width);
  std::vector<ExpertRun> runs;
  float* shared = nullptr;
  if (args.shared_gate_up) {
    const Matrix gate = args.shared_gate_up->matrix(0);
    shared = space.take<float>(args.tokens * width);
    const Activations own = same_inputs(gate, shape) ? q : quantize(args.x, hidden, args.tokens, gate, space);
    runs.push_back({gate, args.shared_down->matrix(0), args.x, own, shared, args.tokens});
  }
  for (std::int64_t e = 0, row = 0; e < gate_up.count(); row += counts[e++]) {
    if (counts[e] == 0) continue;
    runs.push_back({gate_up.matrix(e), args.down->matrix(e), sorted.rows ? sorted.rows + row * hidden : nullptr,
                    rows_from(sorted.quantized, row, shape.groups), outputs + row * width, counts[e]});
  }
  run_experts(runs, space);
  if (shared && args.shared_gate) {
    float* gate = space.take<float>(args.tokens);
    run_products({{args.x, hidden, args.shared_gate->matrix(0), nullptr, gate, 1, args.tokens}}, space);
    sigmoid_scale(shared, gate, shared, args.tokens, width);
  }
  combine({outputs, position, args.weights, shared, args.out, width, args.top_k}, args.tokens);
}

}  // namespace coterie
