// Device: the ops of the native backend over raw pointers. Splits work into chunks and runs a level's kernels on the
// pool.
//
// Shapes and index ranges are checked by bindings.cpp; nothing here raises for a user's mistake. How work is split
// depends on sizes and the number of threads and never changes a row's bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "bank.h"
#include "blocks.h"
#include "kernels.h"
#include "pool.h"
#include "scratch.h"

namespace coterie {

// One product of the many that an op runs side by side: x rows against matrix `weight`.
struct Product {
  const float* x;
  std::int64_t x_stride;
  Matrix weight;
  const float* bias;
  float* out;
  std::int64_t out_stride;
  std::int64_t rows;
};

// One expert's rows through gate and up, SiLU, down. `quantized` is set if gate_up is of an integer kind.
struct ExpertRun {
  Matrix gate_up, down;
  const float* x;
  Activations quantized;
  float* out;
  std::int64_t out_stride, rows;
};

// Panels [first, last) of a matrix.
struct Panels {
  std::int64_t first, last;
};

// A block of at most kActivationGroup columns of one expert's inner width, and the rows that a task takes through it.
struct InnerTask {
  std::size_t run;
  std::int64_t row, rows, first, last;
};

// Where an expert's inner activations go: straight into the narrow form that `down` reads, or as floats [rows, inner]
// into `values`, from where they are narrowed, if at all, when whole rows are there.
struct Inner {
  float* values;
  QuantizeInputs codes;
};

// Feed-forward of a whole step on one rank: every token's K experts and, if there is a bank of them, the shared ones.
struct MoeArgs {
  const float* x;                // [T, H]
  const std::int32_t* ids;       // [T, K]
  const float* weights;          // [T, K]
  const Bank* gate_up;
  const Bank* down;
  const Bank* shared_gate_up;    // or null
  const Bank* shared_down;
  const Bank* shared_gate;       // [1, H] or null: the shared output is scaled by its sigmoid
  float* out;                    // [T, H]
  std::int64_t* counts;          // [E]: rows of each expert, written
  std::int64_t tokens, top_k;
  RowType sums;                  // how combine reads the routed experts' outputs: f32 or rounded
};

// Float rows or their codes in expert order.
struct Gathered {
  const float* rows;
  Activations quantized;
};

// Counting sort of token-expert pairs; stable. token [T * K], position [T, K], counts [E].
void sort_pairs(const std::int32_t* ids, std::int64_t tokens, std::int64_t top_k, std::int64_t experts,
                std::int64_t* token, std::int64_t* position, std::int64_t* counts);

class Device {
 public:
  Device(int threads, const KernelTable& table) : pool_(threads), table_(table) {}

  int threads() const { return pool_.threads(); }
  const KernelTable& table() const { return table_; }
  Pool& pool() { return pool_; }

  // Packs rows, narrowed or quantised to the bank's format.
  void fill(Bank& bank, std::int64_t index, std::int64_t row, std::int64_t n, const float* values);
  void fill_bf16(Bank& bank, std::int64_t index, std::int64_t row, std::int64_t n, const std::uint16_t* bits);
  void fill_codes(Bank& bank, std::int64_t index, std::int64_t row, std::int64_t n, const CodeRows& values);
  void read(const Bank& bank, std::int64_t index, float* out);
  void embed(const Bank& bank, const std::int32_t* ids, std::int64_t n, float* out);
  void products(const std::vector<Product>& products);
  void norm(const NormArgs& args, std::int64_t rows);
  void mla_rows(const MlaArgs& args, std::int64_t rows);
  // Absorbs the query through w_uk (args.query_out), then mla_rows.
  void mla_inputs(const MlaArgs& args, const Bank& w_uk, std::int64_t rows);
  void head_rows(const HeadArgs& args, std::int64_t rows);
  // One matrix per head: heads of x are `step` floats apart, those of out `out_step`.
  void per_head(const float* x, std::int64_t step, const Bank& weight, float* out, std::int64_t out_step,
                std::int64_t rows);
  void latent_block(const LatentBlock& block, const BlockInput& input, const BlockStep& step);
  void grouped_block(const GroupedBlock& block, const BlockInput& input, const BlockStep& step);
  void attend(const AttentionArgs& args, const Sequences& sequences);
  // Logits of x [n, H] and the choice; fills the scores and scratch of `args`.
  void route(const float* x, const Bank& gate, RouteArgs args, std::int64_t rows);
  void experts(const float* x, const std::int64_t* counts, const Bank& gate_up, const Bank& down, float* out);
  // A row on its way to another rank's experts: scales, then codes (or bf16 values), as `experts` narrows it for gate_up.
  // Bytes of it, a multiple of four; 0 where experts read floats.
  std::int64_t row_bytes(const Bank& gate_up) const;
  // Rows [rows, H] into the first row_bytes of rows that are `width` bytes apart.
  void pack_rows(const float* x, std::int64_t rows, const Bank& gate_up, unsigned char* out, std::int64_t width);
  // The same as of the floats that were packed into rows [rows, row_bytes].
  void packed_experts(const unsigned char* rows, const std::int64_t* counts, const Bank& gate_up, const Bank& down,
                      float* out);
  // silu(gate x) * up x of one matrix [2I, H]: x [rows, H] -> out [rows, I].
  void gated(const float* x, std::int64_t rows, const Bank& gate_up, float* out);
  void moe(const MoeArgs& args);
  void combine(const CombineArgs& args, std::int64_t rows);
  void narrow(const NarrowArgs& args, std::int64_t rows);
  void sigmoid_scale(const float* x, const float* gate, float* out, std::int64_t rows, std::int64_t width);
  // Rows [n, heads * dim + exact] into `cache`, whose memory is cache.data.
  void cache_write(const CacheRows& cache, const float* rows, const std::int64_t* slots, std::int64_t n);

 private:
  template <class F>
  void over_rows(std::int64_t rows, std::int64_t row_cost, F body) {
    constexpr std::int64_t kChunk = 1 << 15;  // multiply-adds that are worth another thread
    const std::int64_t step = std::max<std::int64_t>(1, kChunk / std::max<std::int64_t>(1, row_cost));
    parallel_for(pool_, (rows + step - 1) / step,
                 [&](std::int64_t i) { body(i * step, std::min(rows, (i + 1) * step)); });
  }
  template <class F>
  void over_panels(const Bank& bank, std::int64_t row, std::int64_t n, F body);
  // Whether products with weights of a kind take narrow activations (struct Activations) instead of floats.
  bool narrows(Kind kind) const { return is_integer(kind) || (kind == Kind::bf16 && table_.bf16_inputs); }
  // The narrow activations of `rows` rows of x for a weight, in scratch memory; empty if it takes floats.
  Activations quantize(const float* x, std::int64_t x_stride, std::int64_t rows, const Matrix& weight, Scratch& space);
  Activations unpack_rows(const unsigned char* packed, std::int64_t rows, const Bank& gate_up, Scratch& space);
  void run_experts(const float* x, const Activations& q, const std::int64_t* counts, const Bank& gate_up,
                   const Bank& down, float* out, Scratch& space);
  QuantizeInputs inputs_for(const Matrix& weight, std::int64_t rows, Scratch& space, const float* x,
                            std::int64_t x_stride);
  Gathered gather(const float* x, const Activations& q, const Matrix& weight, const std::int64_t* token,
                  std::int64_t pairs, Scratch& space);
  void run_products(const std::vector<Product>& products, Scratch& space);
  void run_tasks(const std::vector<GemmTask>& tasks, std::int64_t cost);
  // Gate, up and SiLU of some experts, whose inner activations are added to `inners`; then their down.
  void run_gates(std::span<const ExpertRun> runs, std::vector<Inner>& inners, Scratch& space, Scratch& brief);
  void run_downs(std::span<const ExpertRun> runs, const std::vector<Inner>& inners, const Panels& panels);
  void run_down_columns(const MoeArgs& args, std::vector<ExpertRun>& runs, const std::vector<Inner>& inners,
                        const std::int64_t* position, Scratch& space);
  void run_inner(const ExpertRun& run, const InnerTask& task, const Inner& out);

  Pool pool_;
  ScratchPool scratch_;
  const KernelTable& table_;
};

}  // namespace coterie
