// A whole attention block as plain values: weights, a step's input, where its rows stand. See blocks.cpp.
#pragma once

#include <cstdint>

#include "bank.h"
#include "kernels.h"

namespace coterie {

// Of the rows of a step those in [first, last) are at hand: queries and outputs begin with row `first`.
struct Sequences {
  const std::int32_t* query_start;  // [count + 1]
  const std::int32_t* positions;    // [T]
  const std::int32_t* blocks;       // [count, stride] or null
  std::int64_t stride;
  std::int64_t count;
  std::int64_t first, last;
};

// A bank of one matrix and its bias or null.
struct Projection {
  const Bank* weight = nullptr;
  const float* bias = nullptr;
};

// MLA. Without q_a the query is q_b of the input.
struct LatentBlock {
  Projection q_a, q_b, kv_a, o;
  const float* q_norm;   // [rows of q_a]
  const float* kv_norm;  // [rank]
  const Bank* w_uk;
  const Bank* w_uv;
  const float* rope_table;
  bool interleaved;
  std::int64_t heads, nope, rank, rope;
  float scale, eps;
};

struct GroupedBlock {
  Projection q, k, v, o;
  const float* q_norm;  // [dim] or null
  const float* k_norm;
  const float* rope_table;
  bool interleaved;
  std::int64_t heads, groups, dim, value_dim, rope;
  float scale, eps;
};

// The block's input is RMSNorm(residual + delta), of delta alone without a residual; `total` takes the sum.
struct BlockInput {
  const float* delta;  // [rows, hidden]
  const float* residual;
  const float* norm;
  float* total;
  float eps;
  std::int64_t rows, hidden;
};

// `slots` null: no cache, the sequences see the step's own rows. MLA uses `first` alone, GQA keys and values.
struct BlockStep {
  Sequences sequences;
  std::int64_t page_size;
  const std::int64_t* slots;
  CacheRows first, second;
  float* out;  // [rows, hidden]
};

}  // namespace coterie
