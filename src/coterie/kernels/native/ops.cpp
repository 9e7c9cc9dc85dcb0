// How each op is split. Costs are rough counts of multiply-adds; a chunk below kChunk is not worth another thread.
#include "ops.h"

#include <algorithm>
#include <cstring>
#include <memory>

namespace coterie {

namespace {

constexpr std::int64_t kChunk = 1 << 15;         // elementwise work
constexpr std::int64_t kProductChunk = 1 << 18;  // multiply-adds of a product
constexpr std::int64_t kProductRows = 64;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// Cuts one product into row and panel ranges of about kProductChunk multiply-adds.
void split(const Product& p, std::vector<GemmTask>& tasks) {
  const std::int64_t panels = ceil_div(p.weight.rows, kPanel);
  for (std::int64_t row = 0; row < p.rows; row += kProductRows) {
    const std::int64_t rows = std::min(kProductRows, p.rows - row);
    const std::int64_t panel_cost = std::max<std::int64_t>(1, rows * p.weight.cols * kPanel);
    const std::int64_t step = std::max<std::int64_t>(1, kProductChunk / panel_cost);
    for (std::int64_t panel = 0; panel < panels; panel += step) {
      tasks.push_back({p.x + row * p.x_stride, p.x_stride, p.weight, p.bias, p.out + row * p.out_stride, p.out_stride,
                       rows, panel, std::min(panels, panel + step)});
    }
  }
}

}  // namespace

template <class F>
void Device::over_rows(std::int64_t rows, std::int64_t row_cost, F body) {
  const std::int64_t step = std::max<std::int64_t>(1, kChunk / std::max<std::int64_t>(1, row_cost));
  parallel_for(pool_, ceil_div(rows, step), [&](std::int64_t i) { body(i * step, std::min(rows, (i + 1) * step)); });
}

void Device::fill(Bank& bank, std::int64_t index, std::int64_t row, std::int64_t n, const float* values) {
  if (n == 0) return;
  const std::int64_t first = row / kPanel, last = (row + n - 1) / kPanel;
  parallel_for(pool_, last - first + 1, [&](std::int64_t i) { bank.pack_panel(index, first + i, row, n, values); });
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

void Device::products(const std::vector<Product>& products) {
  std::vector<GemmTask> tasks;
  std::int64_t cost = 0;
  for (const Product& p : products) {
    split(p, tasks);
    cost += p.rows * p.weight.rows * p.weight.cols;
  }
  // Many small tasks (heads, experts with one row) ride together, a single small product stays on this thread.
  const auto count = static_cast<std::int64_t>(tasks.size());
  const std::int64_t chunks = std::min(count, std::max<std::int64_t>(1, 2 * cost / kProductChunk));
  parallel_for(pool_, chunks, [&](std::int64_t i) {
    for (std::int64_t t = i * count / chunks; t < (i + 1) * count / chunks; ++t) {
      table_.gemm(tasks[static_cast<std::size_t>(t)]);
    }
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

void Device::route(const RouteArgs& args, std::int64_t rows) {
  const std::int64_t cost = args.experts * (args.top_k + 8);
  over_rows(rows, cost, [&](std::int64_t begin, std::int64_t end) { table_.route(args, begin, end); });
}

void Device::experts(const float* x, const std::int64_t* counts, const Bank& gate_up, const Bank& down, float* out) {
  const std::int64_t hidden = gate_up.cols(), inner = down.cols();
  std::int64_t rows = 0;
  for (std::int64_t e = 0; e < gate_up.count(); ++e) rows += counts[e];
  const std::unique_ptr<float[]> both(new float[static_cast<std::size_t>(rows * 2 * inner)]);
  std::vector<Product> up_products, down_products;
  std::int64_t row = 0;
  for (std::int64_t e = 0; e < gate_up.count(); ++e) {
    if (counts[e] == 0) continue;
    float* middle = both.get() + row * 2 * inner;
    up_products.push_back({x + row * hidden, hidden, gate_up.matrix(e), nullptr, middle, 2 * inner, counts[e]});
    down_products.push_back(
        {middle, 2 * inner, down.matrix(e), nullptr, out + row * down.rows(), down.rows(), counts[e]});
    row += counts[e];
  }
  products(up_products);
  over_rows(rows, inner * 8,
            [&](std::int64_t begin, std::int64_t end) { table_.silu_mul(both.get(), inner, begin, end); });
  products(down_products);
}

void Device::combine(const CombineArgs& args, std::int64_t rows) {
  const std::int64_t cost = args.width * (args.top_k + 1);
  over_rows(rows, cost, [&](std::int64_t begin, std::int64_t end) { table_.combine(args, begin, end); });
}

void Device::sigmoid_scale(const float* x, const float* gate, float* out, std::int64_t rows, std::int64_t width) {
  over_rows(rows, width,
            [&](std::int64_t begin, std::int64_t end) { table_.sigmoid_scale(x, gate, out, width, begin, end); });
}

}  // namespace coterie
