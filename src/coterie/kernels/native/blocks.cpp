// Attention blocks in one call: the same Device methods that the single ops call, in the same order, with the arrays
// between them in scratch memory. There is no arithmetic here.
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

void Device::latent_block(const LatentBlock& b, const BlockInput& in, const BlockStep& step) {
  const std::int64_t n = in.rows, width = b.rank + b.rope, q_width = b.heads * (b.nope + b.rope);
  const std::int64_t q_rank = b.q_a.weight ? b.q_a.weight->rows() : 0, value = b.w_uv->rows();
  Scratch space(scratch_);
  float* x = space.take<float>(n * in.hidden);
  float* q_latent = space.take<float>(n * q_rank);
  float* q = space.take<float>(n * q_width);
  float* kv = space.take<float>(n * width);
  float* query = space.take<float>(n * b.heads * width);
  float* rows = space.take<float>(n * width);
  float* attended = space.take<float>(n * b.heads * b.rank);
  float* values = space.take<float>(n * b.heads * value);

  norm({in.delta, in.residual, in.norm, x, in.total, in.hidden, in.eps}, n);
  if (b.q_a.weight) {
    products({project(b.q_a, x, q_latent, n), project(b.kv_a, x, kv, n)});
    norm({q_latent, nullptr, b.q_norm, q_latent, nullptr, q_rank, b.eps}, n);
    products({project(b.q_b, q_latent, q, n)});
  } else {
    products({project(b.q_b, x, q, n), project(b.kv_a, x, kv, n)});
  }
  const Rope rope{b.rope_table, step.sequences.positions, b.rope, b.interleaved};
  mla_inputs({q, kv, b.kv_norm, query, rows, rope, b.heads, b.nope, b.rank, b.eps}, *b.w_uk, n);
  if (step.slots) cache_write(step.first, rows, step.slots, n);
  const CacheRows keys = step.slots ? step.first : own_rows(rows, 1, b.rank, b.rope);
  attend({query, keys, keys, attended, b.heads, 1, width, b.rank, b.scale, step.page_size}, step.sequences);
  per_head(attended, b.rank, *b.w_uv, values, value, n);
  products({project(b.o, values, step.out, n)});
}

void Device::grouped_block(const GroupedBlock& b, const BlockInput& in, const BlockStep& step) {
  const std::int64_t n = in.rows, q_width = b.heads * b.dim, k_width = b.groups * b.dim;
  const std::int64_t v_width = b.groups * b.value_dim, out_width = b.heads * b.value_dim;
  Scratch space(scratch_);
  float* x = space.take<float>(n * in.hidden);
  float* q = space.take<float>(n * q_width);
  float* k = space.take<float>(n * k_width);
  float* v = space.take<float>(n * v_width);
  float* query = space.take<float>(n * q_width);
  float* key = space.take<float>(n * k_width);
  float* attended = space.take<float>(n * out_width);

  norm({in.delta, in.residual, in.norm, x, in.total, in.hidden, in.eps}, n);
  products({project(b.q, x, q, n), project(b.k, x, k, n), project(b.v, x, v, n)});
  const Rope rope{b.rope_table, step.sequences.positions, b.rope, b.interleaved};
  head_rows({q, b.q_norm, query, rope, b.heads, b.dim, b.eps}, n);
  head_rows({k, b.k_norm, key, rope, b.groups, b.dim, b.eps}, n);
  if (step.slots) {
    cache_write(step.first, key, step.slots, n);
    cache_write(step.second, v, step.slots, n);
  }
  const CacheRows keys = step.slots ? step.first : own_rows(key, b.groups, b.dim, 0);
  const CacheRows values = step.slots ? step.second : own_rows(v, b.groups, b.value_dim, 0);
  attend({query, keys, values, attended, b.heads, b.groups, b.dim, b.value_dim, b.scale, step.page_size},
         step.sequences);
  products({project(b.o, attended, step.out, n)});
}

}  // namespace coterie
