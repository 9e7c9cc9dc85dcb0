// Attention blocks in one call: the same Device methods that the single ops call, in the same order, with the arrays
// between them in scratch memory. There is no arithmetic here.
#include <algorithm>

#include "ops.h"

namespace coterie {

namespace {

Product project(const Projection& p, const float* x, float* out, std::int64_t rows) {
  return {x, p.weight->cols(), p.weight->matrix(0), p.bias, out, p.weight->rows(), rows};
}

CacheRows own_rows(const float* rows, std::int64_t heads, std::int64_t dim, std::int64_t exact) {
  const std::int64_t width = heads * dim + exact;
  return {reinterpret_cast<const char*>(rows), CacheKind::f32, width * 4, heads, dim, exact};
}

// Rows that are taken through a whole block before the next ones: what lies between its products is as large as they
// are many. A row sees no later one, so that the parts follow each other as steps would.
constexpr std::int64_t kPartRows = 512;

std::int64_t parts_of(std::int64_t rows) {
  return (rows + kPartRows - 1) / kPartRows;
}

std::int64_t largest_part(std::int64_t rows) {
  const std::int64_t parts = std::max<std::int64_t>(1, parts_of(rows));
  return (rows + parts - 1) / parts;
}

// Calls body(input, step) for parts of nearly the same size, in order.
template <class F>
void for_parts(const BlockInput& input, const BlockStep& step, F body) {
  const std::int64_t parts = parts_of(input.rows);
  for (std::int64_t i = 0; i < parts; ++i) {
    const std::int64_t first = i * input.rows / parts, at = first * input.hidden;
    BlockInput in = input;
    BlockStep part = step;
    part.sequences.first = first, part.sequences.last = (i + 1) * input.rows / parts;
    in.rows = part.sequences.last - first;
    in.delta += at, part.out += at;
    if (in.residual) in.residual += at, in.total += at;
    if (part.slots) part.slots += first;
    body(in, part);
  }
}

}  // namespace

void Device::per_head(const float* x, std::int64_t step, const Bank& weight, float* out, std::int64_t out_step,
                      std::int64_t rows) {
  const std::int64_t heads = weight.count();
  std::vector<Product> each;
  for (std::int64_t h = 0; h < heads; ++h) {
    each.push_back(
        {x + h * step, heads * step, weight.matrix(h), nullptr, out + h * out_step, heads * out_step, rows});
  }
  products(each);
}

void Device::mla_inputs(const MlaArgs& args, const Bank& w_uk, std::int64_t rows) {
  per_head(args.query, args.nope + args.rope.dim, w_uk, args.query_out, args.rank + args.rope.dim, rows);
  mla_rows(args, rows);
}

void Device::latent_block(const LatentBlock& b, const BlockInput& input, const BlockStep& step) {
  const std::int64_t width = b.rank + b.rope, most = largest_part(input.rows);
  const std::int64_t q_rank = b.q_a.weight ? b.q_a.weight->rows() : 0, value = b.w_uv->rows();
  Scratch space(scratch_);
  float* x = space.take<float>(most * input.hidden);
  float* q_latent = space.take<float>(most * q_rank);
  float* q = space.take<float>(most * b.heads * (b.nope + b.rope));
  float* kv = space.take<float>(most * width);
  float* query = space.take<float>(most * b.heads * width);
  float* attended = space.take<float>(most * b.heads * b.rank);
  float* values = space.take<float>(most * b.heads * value);
  float* own = space.take<float>((step.slots ? most : input.rows) * width);
  const CacheRows keys = step.slots ? step.first : own_rows(own, 1, b.rank, b.rope);
  for_parts(input, step, [&](const BlockInput& in, const BlockStep& at) {
    const std::int64_t n = in.rows;
    float* rows = step.slots ? own : own + at.sequences.first * width;
    norm({in.delta, in.residual, in.norm, x, in.total, in.hidden, in.eps}, n);
    if (b.q_a.weight) {
      products({project(b.q_a, x, q_latent, n), project(b.kv_a, x, kv, n)});
      norm({q_latent, nullptr, b.q_norm, q_latent, nullptr, q_rank, b.eps}, n);
      products({project(b.q_b, q_latent, q, n)});
    } else {
      products({project(b.q_b, x, q, n), project(b.kv_a, x, kv, n)});
    }
    const Rope rope{b.rope_table, at.sequences.positions + at.sequences.first, b.rope, b.interleaved};
    mla_inputs({q, kv, b.kv_norm, query, rows, rope, b.heads, b.nope, b.rank, b.eps}, *b.w_uk, n);
    if (at.slots) cache_write(at.first, rows, at.slots, n);
    attend({query, keys, keys, attended, b.heads, 1, width, b.rank, b.scale, at.page_size}, at.sequences);
    per_head(attended, b.rank, *b.w_uv, values, value, n);
    products({project(b.o, values, at.out, n)});
  });
}

void Device::grouped_block(const GroupedBlock& b, const BlockInput& input, const BlockStep& step) {
  const std::int64_t most = largest_part(input.rows), kept = step.slots ? most : input.rows;
  const std::int64_t q_width = b.heads * b.dim, k_width = b.groups * b.dim, v_width = b.groups * b.value_dim;
  Scratch space(scratch_);
  float* x = space.take<float>(most * input.hidden);
  float* q = space.take<float>(most * q_width);
  float* k = space.take<float>(most * k_width);
  float* query = space.take<float>(most * q_width);
  float* attended = space.take<float>(most * b.heads * b.value_dim);
  float* own_keys = space.take<float>(kept * k_width);
  float* own_values = space.take<float>(kept * v_width);
  const CacheRows keys = step.slots ? step.first : own_rows(own_keys, b.groups, b.dim, 0);
  const CacheRows values = step.slots ? step.second : own_rows(own_values, b.groups, b.value_dim, 0);
  for_parts(input, step, [&](const BlockInput& in, const BlockStep& at) {
    const std::int64_t n = in.rows, row = step.slots ? 0 : at.sequences.first;
    float *key = own_keys + row * k_width, *v = own_values + row * v_width;
    norm({in.delta, in.residual, in.norm, x, in.total, in.hidden, in.eps}, n);
    products({project(b.q, x, q, n), project(b.k, x, k, n), project(b.v, x, v, n)});
    const Rope rope{b.rope_table, at.sequences.positions + at.sequences.first, b.rope, b.interleaved};
    head_rows({q, b.q_norm, query, rope, b.heads, b.dim, b.eps}, n);
    head_rows({k, b.k_norm, key, rope, b.groups, b.dim, b.eps}, n);
    if (at.slots) {
      cache_write(at.first, key, at.slots, n);
      cache_write(at.second, v, at.slots, n);
    }
    attend({query, keys, values, attended, b.heads, b.groups, b.dim, b.value_dim, b.scale, at.page_size},
           at.sequences);
    products({project(b.o, attended, at.out, n)});
  });
}

}  // namespace coterie
