// Products and experts: how matrix work is cut into tasks for the pool. A task is a few panels against all rows that
// need them, so that weights stream from memory once a step; tasks are taken from one counter by whichever thread is
// free.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "ops.h"

namespace coterie {

namespace {

constexpr std::int64_t kProductChunk = 1 << 18;  // multiply-adds of a task
constexpr std::int64_t kLongChunk = 1 << 22;     // of one of a product that is long enough for many of them
constexpr std::int64_t kManyTasks = 16;
constexpr std::int64_t kFloatRows = 64;          // rows of a task of a float kind

// Cuts the panels of one product, and its rows, into ranges of about kProductChunk multiply-adds; up to kLongChunk
// where panels are many, so that a thread goes on with the panel that it has begun to fetch.
void split(const Product& p, const Activations& quantized, const Panels& panels, std::vector<GemmTask>& tasks) {
  const std::int64_t most = quantized.codes ? kMaxIntRows : kFloatRows;
  for (std::int64_t row = 0; row < p.rows; row += most) {
    const std::int64_t rows = std::min(most, p.rows - row);
    const std::int64_t panel_cost = std::max<std::int64_t>(1, rows * p.weight.cols * kPanel);
    const std::int64_t most_panels = std::min(kLongChunk / panel_cost, (panels.last - panels.first) / kManyTasks);
    const std::int64_t step = std::max({std::int64_t{1}, kProductChunk / panel_cost, most_panels});
    const Activations q = rows_from(quantized, row, p.weight.groups);
    for (std::int64_t panel = panels.first; panel < panels.last; panel += step) {
      tasks.push_back({p.x + row * p.x_stride, p.x_stride, q, p.weight, p.bias, p.out + row * p.out_stride,
                       p.out_stride, rows, panel, std::min(panels.last, panel + step)});
    }
  }
}

// Columns that share a factor in int8 activations for a weight.
std::int64_t activation_group(const Matrix& weight) {
  if (weight.format.group == 0) return input_stride(weight.format.kind, weight.cols);
  return std::max(kLeastActivationGroup, weight.format.group);
}

// The parts of a row that travels.
struct PackedRow {
  std::int64_t scale_bytes, code_bytes;

  explicit PackedRow(const Matrix& weight) {
    const bool bf16 = weight.format.kind == Kind::bf16;
    const std::int64_t group = activation_group(weight);
    scale_bytes = bf16 ? 0 : (weight.cols + group - 1) / group * static_cast<std::int64_t>(sizeof(float));
    code_bytes = weight.cols * (bf16 ? 2 : 1);
  }
};

// Narrow activations from row `row` on.
QuantizeInputs inputs_from(QuantizeInputs args, std::int64_t row) {
  args.codes += row * args.stride;
  if (args.scales) args.scales += row * args.groups, args.sums += row * args.weight_groups;
  return args;
}

}  // namespace

Activations Device::quantize(const float* x, std::int64_t x_stride, std::int64_t rows, const Matrix& weight,
                             Scratch& space) {
  if (!narrows(weight.format.kind)) return {};
  const QuantizeInputs args = inputs_for(weight, rows, space, x, x_stride);
  over_rows(rows, weight.cols,
            [&](std::int64_t begin, std::int64_t end) { table_.quantize_inputs(args, begin, end); });
  return {args.codes, args.scales, args.sums, args.stride, args.group, args.groups};
}

QuantizeInputs Device::inputs_for(const Matrix& weight, std::int64_t rows, Scratch& space, const float* x,
                                  std::int64_t x_stride) {
  const bool bf16 = weight.format.kind == Kind::bf16;
  const std::int64_t stride = input_stride(weight.format.kind, weight.cols);
  auto* codes = space.take<std::int8_t>((rows + kTileSlack) * stride);
  if (bf16) {
    return {x, x_stride, weight.cols, 0, weight.cols, codes, nullptr, nullptr, stride, kActivationGroup, 0, 0, 0, 0, 0};
  }
  const std::int64_t group = activation_group(weight), groups = (weight.cols + group - 1) / group;
  return {x, x_stride, weight.cols, 0, weight.cols, codes, space.take<float>(rows * groups),
          space.take<std::int32_t>(rows * weight.groups), stride, group, groups, weight.group, weight.groups,
          zero_of(weight.format), start_of(weight.format)};
}

void Device::run_tasks(const std::vector<GemmTask>& tasks, std::int64_t cost) {
  // Many small tasks (heads, experts with one row) ride together, a single small product stays on this thread.
  const auto count = static_cast<std::int64_t>(tasks.size());
  const std::int64_t chunks = std::min(count, std::max<std::int64_t>(1, 2 * cost / kProductChunk));
  parallel_for(pool_, chunks, [&](std::int64_t i) {
    for (std::int64_t t = i * count / chunks; t < (i + 1) * count / chunks; ++t) {
      table_.gemm(tasks[static_cast<std::size_t>(t)]);
    }
  });
}

void Device::products(const std::vector<Product>& products) {
  Scratch space(scratch_);
  run_products(products, space);
}

void Device::run_products(const std::vector<Product>& products, Scratch& space) {
  std::vector<GemmTask> tasks;
  std::int64_t cost = 0;
  for (const Product& p : products) {
    split(p, quantize(p.x, p.x_stride, p.rows, p.weight, space), {0, panels_of(p.weight)}, tasks);
    cost += p.rows * p.weight.rows * p.weight.cols;
  }
  run_tasks(tasks, cost);
}

// `brief`: memory that need not outlive this call.
void Device::run_gates(std::span<const ExpertRun> runs, std::vector<Inner>& inners, Scratch& space, Scratch& brief) {
  std::vector<InnerTask> tasks;
  const std::size_t start = inners.size();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const ExpertRun& run = runs[i];
    const std::int64_t inner = run.down.cols;
    const bool narrow = narrows(run.down.format.kind);
    QuantizeInputs codes = narrow ? inputs_for(run.down, run.rows, space, nullptr, inner) : QuantizeInputs{};
    const bool direct = narrow && codes.group <= kActivationGroup;
    float* values = direct ? nullptr : (narrow ? brief : space).take<float>(run.rows * inner);
    codes.x = values;
    inners.push_back({values, codes});
    for (std::int64_t row = 0; row < run.rows; row += kMaxIntRows) {
      for (std::int64_t first = 0; first < inner; first += kActivationGroup) {
        tasks.push_back({i, row, std::min(kMaxIntRows, run.rows - row), first,
                         std::min(inner, first + kActivationGroup)});
      }
    }
  }
  parallel_for(pool_, static_cast<std::int64_t>(tasks.size()), [&](std::int64_t i) {
    const InnerTask& task = tasks[static_cast<std::size_t>(i)];
    run_inner(runs[task.run], task, inners[start + task.run]);
  });
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto& [values, codes] = inners[start + i];
    if (!values || !codes.codes) continue;
    over_rows(runs[i].rows, runs[i].down.cols,
              [&](std::int64_t begin, std::int64_t end) { table_.quantize_inputs(codes, begin, end); });
  }
}

void Device::run_downs(std::span<const ExpertRun> runs, const std::vector<Inner>& inners, const Panels& panels) {
  std::vector<GemmTask> tasks;
  std::int64_t cost = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const ExpertRun& run = runs[i];
    const auto& [values, d] = inners[i];
    split({values, run.down.cols, run.down, nullptr, run.out, run.out_stride, run.rows},
          {d.codes, d.scales, d.sums, d.stride, d.group, d.groups}, panels, tasks);
    cost += run.rows * (panels.last - panels.first) * kPanel * run.down.cols;
  }
  run_tasks(tasks, cost);
}

// Gate, up and their product stay in a small buffer; what leaves it is the narrow form that `down` reads, or the values.
void Device::run_inner(const ExpertRun& run, const InnerTask& task, const Inner& out) {
  constexpr std::int64_t kWidth = 2 * kActivationGroup;
  const std::int64_t hidden = run.gate_up.cols, inner = run.down.cols, width = task.last - task.first;
  Scratch space(scratch_);
  float* gated = space.take<float>(task.rows * kWidth);
  const Activations q = rows_from(run.quantized, task.row, run.gate_up.groups);
  for (std::int64_t half = 0; half < 2; ++half) {
    const std::int64_t base = half * run.gate_up.segment_panels;
    // Output `first` of the half goes to column 0 of its part of the buffer.
    float* target = gated + half * kActivationGroup - (half * inner + task.first);
    table_.gemm({run.x ? run.x + task.row * hidden : nullptr, hidden, q, run.gate_up, nullptr, target, kWidth, task.rows,
                 base + task.first / kPanel, base + (task.last + kPanel - 1) / kPanel});
  }
  table_.silu_mul(gated, kActivationGroup, 0, width, 0, task.rows);
  if (out.values) {
    for (std::int64_t r = 0; r < task.rows; ++r) {
      std::memcpy(out.values + (task.row + r) * inner + task.first, gated + r * kWidth,
                  sizeof(float) * static_cast<std::size_t>(width));
    }
    return;
  }
  QuantizeInputs down = inputs_from(out.codes, task.row);
  down.x = gated - task.first, down.x_stride = kWidth, down.first = task.first, down.last = task.last;
  table_.quantize_inputs(down, 0, task.rows);
}

void Device::experts(const float* x, const std::int64_t* counts, const Bank& gate_up, const Bank& down, float* out) {
  Scratch space(scratch_);
  const std::int64_t rows = std::accumulate(counts, counts + gate_up.count(), std::int64_t{0});
  run_experts(x, quantize(x, gate_up.cols(), rows, gate_up.shape(), space), counts, gate_up, down, out, space);
}

void Device::packed_experts(const unsigned char* rows, const std::int64_t* counts, const Bank& gate_up,
                            const Bank& down, float* out) {
  Scratch space(scratch_);
  const std::int64_t count = std::accumulate(counts, counts + gate_up.count(), std::int64_t{0});
  run_experts(nullptr, unpack_rows(rows, count, gate_up, space), counts, gate_up, down, out, space);
}

std::int64_t Device::row_bytes(const Bank& gate_up) const {
  const Matrix& weight = gate_up.shape();
  if (!narrows(weight.format.kind)) return 0;
  const PackedRow row(weight);
  return round_up(row.scale_bytes + row.code_bytes, 4);
}

void Device::pack_rows(const float* x, std::int64_t rows, const Bank& gate_up, unsigned char* out, std::int64_t width) {
  Scratch space(scratch_);
  const PackedRow row(gate_up.shape());
  const Activations q = quantize(x, gate_up.cols(), rows, gate_up.shape(), space);
  over_rows(rows, width / 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      unsigned char* target = out + r * width;
      if (q.scales) std::memcpy(target, q.scales + r * q.groups, static_cast<std::size_t>(row.scale_bytes));
      std::memcpy(target + row.scale_bytes, q.codes + r * q.stride, static_cast<std::size_t>(row.code_bytes));
    }
  });
}

Activations Device::unpack_rows(const unsigned char* packed, std::int64_t rows, const Bank& gate_up, Scratch& space) {
  const PackedRow row(gate_up.shape());
  const std::int64_t width = row_bytes(gate_up);
  const QuantizeInputs q = inputs_for(gate_up.shape(), rows, space, nullptr, 0);
  over_rows(rows, width / 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const unsigned char* source = packed + r * width;
      if (q.scales) std::memcpy(q.scales + r * q.groups, source, static_cast<std::size_t>(row.scale_bytes));
      std::memcpy(q.codes + r * q.stride, source + row.scale_bytes, static_cast<std::size_t>(row.code_bytes));
    }
    table_.finish_inputs(q, begin, end);
  });
  return {q.codes, q.scales, q.sums, q.stride, q.group, q.groups};
}

// Floats x, or what they were narrowed to, through the experts; `x` is read only where experts take floats.
void Device::run_experts(const float* x, const Activations& q, const std::int64_t* counts, const Bank& gate_up,
                         const Bank& down, float* out, Scratch& space) {
  std::vector<ExpertRun> runs;
  std::int64_t row = 0;
  for (std::int64_t e = 0; e < gate_up.count(); ++e) {
    if (counts[e] == 0) continue;
    runs.push_back({gate_up.matrix(e), down.matrix(e), x ? x + row * gate_up.cols() : nullptr,
                    rows_from(q, row, gate_up.shape().groups), out + row * down.rows(), down.rows(), counts[e]});
    row += counts[e];
  }
  std::vector<Inner> inners;
  run_gates(runs, inners, space, space);
  run_downs(runs, inners, {0, panels_of(down.shape())});
}

void Device::gated(const float* x, std::int64_t rows, const Bank& gate_up, float* out) {
  Scratch space(scratch_);
  const std::int64_t inner = gate_up.rows() / 2;
  Matrix width{};  // only its columns are read: no product follows here
  width.cols = inner;
  const ExpertRun run{gate_up.matrix(0), width, x, quantize(x, gate_up.cols(), rows, gate_up.shape(), space), nullptr, 0, rows};
  const std::int64_t blocks = (inner + kActivationGroup - 1) / kActivationGroup;
  const std::int64_t turns = (rows + kMaxIntRows - 1) / kMaxIntRows;
  parallel_for(pool_, turns * blocks, [&](std::int64_t i) {
    const std::int64_t row = i / blocks * kMaxIntRows, first = i % blocks * kActivationGroup;
    run_inner(run, {0, row, std::min(kMaxIntRows, rows - row), first, std::min(inner, first + kActivationGroup)}, {out, {}});
  });
}

void sort_pairs(const std::int32_t* ids, std::int64_t tokens, std::int64_t top_k, std::int64_t experts,
                std::int64_t* token, std::int64_t* position, std::int64_t* counts) {
  std::vector<std::int64_t> next(static_cast<std::size_t>(experts) + 1, 0);
  const std::int64_t pairs = tokens * top_k;
  for (std::int64_t i = 0; i < pairs; ++i) ++next[static_cast<std::size_t>(ids[i]) + 1];
  for (std::int64_t e = 0; e < experts; ++e) {
    counts[e] = next[static_cast<std::size_t>(e) + 1];
    next[static_cast<std::size_t>(e) + 1] += next[static_cast<std::size_t>(e)];
  }
  for (std::int64_t i = 0; i < pairs; ++i) {
    const std::int64_t at = next[static_cast<std::size_t>(ids[i])]++;
    token[at] = i / top_k;
    position[i] = at;
  }
}

}  // namespace coterie
