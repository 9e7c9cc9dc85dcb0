// Device: the ops of the native backend over raw pointers. Splits work into chunks and runs a level's kernels on the
// pool.
//
// Shapes and index ranges are checked by bindings.cpp; nothing here raises for a user's mistake. How work is split
// depends on sizes and the number of threads and never changes a row's bits.
#pragma once

#include <cstdint>
#include <vector>

#include "bank.h"
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

struct Sequences {
  const std::int32_t* query_start;  // [count + 1]
  const std::int32_t* positions;    // [T]
  const std::int32_t* blocks;       // [count, stride] or null
  std::int64_t stride;
  std::int64_t count;
};

class Device {
 public:
  Device(int threads, const KernelTable& table) : pool_(threads), table_(table) {}

  int threads() const { return pool_.threads(); }
  const KernelTable& table() const { return table_; }
  Pool& pool() { return pool_; }

  void fill(Bank& bank, std::int64_t index, std::int64_t row, std::int64_t n, const float* values);
  void read(const Bank& bank, std::int64_t index, float* out);
  void embed(const Bank& bank, const std::int32_t* ids, std::int64_t n, float* out);
  void products(const std::vector<Product>& products);
  void norm(const NormArgs& args, std::int64_t rows);
  void mla_rows(const MlaArgs& args, std::int64_t rows);
  void head_rows(const HeadArgs& args, std::int64_t rows);
  void attend(const AttentionArgs& args, const Sequences& sequences);
  void route(const RouteArgs& args, std::int64_t rows);
  void experts(const float* x, const std::int64_t* counts, const Bank& gate_up, const Bank& down, float* out);
  void combine(const CombineArgs& args, std::int64_t rows);
  void sigmoid_scale(const float* x, const float* gate, float* out, std::int64_t rows, std::int64_t width);
  void cache_write(void* cache, Kind kind, const float* rows, const std::int64_t* slots, std::int64_t n,
                   std::int64_t width);

 private:
  template <class F>
  void over_rows(std::int64_t rows, std::int64_t row_cost, F body);

  Pool pool_;
  ScratchPool scratch_;
  const KernelTable& table_;
};

}  // namespace coterie
