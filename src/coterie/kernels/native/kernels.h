// The table of inner kernels that each ISA level provides, and the plain values they take.
//
// A kernel is serial, allocates nothing and writes only its own output rows; ops.cpp splits the work and calls it from
// the pool. Everything behind the table is compiled once per level, so this header holds no inline code that could be
// emitted for one level and linked into another.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace coterie {

// Rows of int8 activations: codes [rows, stride] (columns padded with zeros to 64), scales [rows, groups], one for
// every `group` columns, and for each scale group of the weights the sum of its codes times the `zero` of the weights,
// plus their `start` (layout.h), [rows, weight groups].
// For bf16 weights, where the level takes bf16 activations: codes are bf16 values, padded with zeros to 32 columns;
// `stride` stays in bytes; no scales and no sums.
struct Activations {
  const std::int8_t* codes;
  const float* scales;
  const std::int32_t* sums;
  std::int64_t stride, group, groups;
};

// Activations from row `row` on; nothing stays nothing.
static inline Activations rows_from(const Activations& q, std::int64_t row, std::int64_t weight_groups) {
  if (!q.codes) return q;
  return {q.codes + row * q.stride,
          q.scales ? q.scales + row * q.groups : nullptr,
          q.sums ? q.sums + row * weight_groups : nullptr,
          q.stride, q.group, q.groups};
}

// Rows a task with narrow activations may have, and rows of memory that can be read behind them (tiles read 16 rows).
inline constexpr std::int64_t kMaxIntRows = 256;
inline constexpr std::int64_t kTileSlack = 15;

// out[r, j] = sum_k x[r, k] * W[j, k] (+ bias) for the outputs j of panels [panel_begin, panel_end). Integer kinds read
// `quantized` instead of x.
struct GemmTask {
  const float* x;
  std::int64_t x_stride;
  Activations quantized;
  Matrix weight;
  const float* bias;
  float* out;
  std::int64_t out_stride;
  std::int64_t rows;
  std::int64_t panel_begin;
  std::int64_t panel_end;
};

// int8 codes (bf16 values if `scales` is null) of columns [first, last) of float rows, for weights with scales every `weight_group` columns. `first` and
// `last` are multiples of both groups, or the end of the row.
struct QuantizeInputs {
  const float* x;
  std::int64_t x_stride, cols, first, last;
  std::int8_t* codes;
  float* scales;
  std::int32_t* sums;
  std::int64_t stride, group, groups, weight_group, weight_groups;
  std::int32_t zero, start;
};

// Format and width of a weight row that is to be quantised; `group` in columns, never 0.
struct QuantizeArgs {
  Format format;
  std::int64_t cols, group;
};

// RMSNorm of x (+ residual, whose sum goes to `total`), rows of `width`.
struct NormArgs {
  const float* x;
  const float* residual;
  const float* weight;
  float* out;
  float* total;
  std::int64_t width;
  float eps;
};

struct Rope {
  const float* table;  // [positions, 2, dim / 2]
  const std::int32_t* positions;
  std::int64_t dim;
  bool interleaved;
};

// The parts of absorbed MLA that are not products: rotated query tails, normed and rotated cache rows.
struct MlaArgs {
  const float* query;   // [T, heads, nope + rope]
  const float* kv;      // [T, rank + rope]
  const float* weight;  // [rank]
  float* query_out;     // [T, heads, rank + rope]
  float* rows_out;      // [T, rank + rope]
  Rope rope;
  std::int64_t heads, nope, rank;
  float eps;
};

// Per-head norm (if weight) and rope of the first rope.dim channels.
struct HeadArgs {
  const float* x;       // [T, heads, dim]
  const float* weight;  // [dim] or null
  float* out;
  Rope rope;
  std::int64_t heads, dim;
  float eps;
};

enum class CacheKind : int { f32, bf16, int8 };

// How rows of keys or values lie in memory: [slots, stride bytes], channels of `heads` heads of `dim`, then `exact` more
// (the rope part of MLA). int8: codes of all heads, an f32 scale per head and kScaleGroup channels of it, and the exact
// channels in bf16.
struct CacheRows {
  const char* data;
  CacheKind kind;
  std::int64_t stride;
  std::int64_t heads, dim, exact;
};

inline constexpr std::int64_t kScaleGroup = 64;

static constexpr std::int64_t scale_groups(std::int64_t dim) {
  return (dim + kScaleGroup - 1) / kScaleGroup;
}

// Keys and values are cache streams read through block tables (block_tables != null), or the step's own rows.
struct AttentionArgs {
  const float* query;  // [T, heads, key_dim]
  CacheRows keys;
  CacheRows values;
  float* out;  // [T, heads, value_dim]
  std::int64_t heads, groups, key_dim, value_dim;
  float scale;
  std::int64_t page_size;
};

// Rows [row, row + rows) of one sequence against heads [head, head + heads) of one key head. Row i sits at position
// first_position + i. Slots come from `blocks` if the cache is paged, else slot = base_row + position. With `partial`
// the task is split `split` alone and leaves its maximum, sum and output there; else all splits, merged into the
// output. `scratch` holds a tile of keys, one of values, the pairs' queries and two partials.
struct AttentionTask {
  std::int64_t row, rows, first_position;
  std::int64_t head, heads;
  const std::int32_t* blocks;
  std::int64_t base_row;
  std::int64_t split = 0;
  float* partial = nullptr;
  float* scratch = nullptr;
};

// State of pairs (row, head) after some keys: undivided output, maximum, sum.
struct Partial {
  float* out;    // [pairs, value_dim padded]
  float* top;    // [pairs]
  float* total;  // [pairs]
};

inline constexpr std::int64_t kSplit = 256;  // positions of a split: part of the arithmetic, not of the scheduling

// Channels of a head that attention in tiles may have; wider ones are computed in vectors.
inline constexpr std::int64_t kMaxTileChannels = 2048;

// Channels in whole vectors of any level, and floats from one row of a tile to the next.
static constexpr std::int64_t pad_channels(std::int64_t dim) {
  return (dim + 15) / 16 * 16;
}
static constexpr std::int64_t tile_stride(std::int64_t dim) {
  return ((dim + 15) / 16 | 1) * 16;
}

// Selection of experts from logits. `scores` holds the logits and is overwritten; `biased` and `group_scores` are
// scratch.
struct RouteArgs {
  float* scores;        // [T, experts]
  const float* bias;    // [experts] or null
  float* biased;        // [T, experts]
  float* group_scores;  // [T, groups]
  std::int32_t* ids;    // [T, top_k]
  float* weights;       // [T, top_k]
  std::int64_t experts, top_k, groups, topk_groups;
  bool sigmoid, top2_sum, normalize, scale;
  float norm_epsilon, scaling;
};

// How combine reads the rows that it sums: as they are, rounded to bf16 first (what they would be had they come from
// another rank), or bf16 values.
enum class RowType : int { f32, rounded, bf16 };

struct CombineArgs {
  const void* rows;              // [M, width]
  RowType type;
  const std::int64_t* position;  // [T, top_k]
  const float* weights;          // [T, top_k]
  const float* shared;           // [T, width] or null
  float* out;                    // rows out_stride apart
  std::int64_t width, out_stride, top_k;
};

// Rows take[i] of x, to the nearest bf16.
struct NarrowArgs {
  const float* x;            // [M, width]
  const std::int64_t* take;  // [n]
  std::uint16_t* out;        // [n, width]
  std::int64_t width;
};

struct KernelTable {
  const char* name;
  bool bf16_inputs;  // bf16 weights multiply activations that were rounded to bf16
  void (*gemm)(const GemmTask&);
  void (*quantize_inputs)(const QuantizeInputs&, std::int64_t begin, std::int64_t end);
  // What quantize_inputs leaves beside codes that are there already: zeros behind them, and their sums.
  void (*finish_inputs)(const QuantizeInputs&, std::int64_t begin, std::int64_t end);
  // A weight row [cols] to unpacked codes [cols], scales and mins [groups].
  void (*quantize_row)(const QuantizeArgs&, const float* x, std::uint8_t* codes, float* scales, float* mins);
  void (*norm)(const NormArgs&, std::int64_t begin, std::int64_t end);
  void (*mla_rows)(const MlaArgs&, std::int64_t begin, std::int64_t end);
  void (*head_rows)(const HeadArgs&, std::int64_t begin, std::int64_t end);
  void (*attention)(const AttentionArgs&, const AttentionTask&);
  void (*attention_merge)(const AttentionArgs&, const AttentionTask&, std::int64_t stride, std::int64_t begin,
                          std::int64_t end);
  void (*route)(const RouteArgs&, std::int64_t begin, std::int64_t end);
  void (*combine)(const CombineArgs&, std::int64_t begin, std::int64_t end);
  void (*narrow)(const NarrowArgs&, std::int64_t begin, std::int64_t end);
  // x[r, first:last] = silu(x[r, first:last]) * x[r, inner+first:inner+last]
  void (*silu_mul)(float* x, std::int64_t inner, std::int64_t first, std::int64_t last, std::int64_t begin,
                   std::int64_t end);
  // out[r] = x[r] * sigmoid(gate[r])
  void (*sigmoid_scale)(const float* x, const float* gate, float* out, std::int64_t width, std::int64_t begin,
                        std::int64_t end);
  // Attention in bf16 tiles, for caches narrower than float32, and the floats of scratch it takes for so many pairs;
  // null where the level has no tiles.
  void (*tile_attention)(const AttentionArgs&, const AttentionTask&);
  std::int64_t (*tile_attention_floats)(const AttentionArgs&, std::int64_t pairs);
};

namespace generic {
extern const KernelTable table;
}
#ifdef COTERIE_X86
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
// Products and attention in tiles: the rest of these levels is avx512's.
struct TileKernels {
  void (*gemm)(const GemmTask&);
  void (*attention)(const AttentionArgs&, const AttentionTask&);
  std::int64_t (*attention_floats)(const AttentionArgs&, std::int64_t pairs);
};
namespace amx {
extern const TileKernels tile_kernels;
}
namespace amx_emulated {
extern const TileKernels tile_kernels;
}
#endif

}  // namespace coterie
