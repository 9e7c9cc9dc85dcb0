// The Python edge of attention: inputs, cache rows, attend. Same rules as bindings.cpp: every shape, type and index
// that a kernel relies on is checked here and named in the message; the GIL is released while an op computes.
#include "bindings_attention.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <utility>

#include "checks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace coterie {

namespace {

struct AttentionShape {
  std::int64_t heads, groups, key_dim, value_dim, nope, rank, rope_dim;
  bool interleaved;
  float scale, eps;
};

Rope make_rope(const char* op, const In& table, const Ids& positions, const AttentionShape& shape) {
  require(table.ndim() == 3, std::string(op) + ": the rope table is [positions, 2, dim/2]");
  expect(op, "rope table", table, {static_cast<std::int64_t>(table.shape(0)), 2, shape.rope_dim / 2});
  expect_range(op, "positions", positions, static_cast<std::int64_t>(table.shape(0)));
  return {table.data(), positions.data(), shape.rope_dim, shape.interleaved};
}

struct RopeInputs {
  In table;
  Ids positions;
};

void mla_inputs(Device& device, const In& query, const In& kv, const Bank& w_uk, const In& weight,
                const RopeInputs& inputs, const AttentionShape& s, const Out& query_out, const Out& rows_out) {
  const std::int64_t n = rows_of("mla_inputs", query), width = s.rank + s.rope_dim, in = s.nope + s.rope_dim;
  expect("mla_inputs", "query", query, {n, s.heads * in});
  expect("mla_inputs", "kv", kv, {n, width});
  expect("mla_inputs", "positions", inputs.positions, {n});
  expect("mla_inputs", "norm weight", weight, {s.rank});
  expect("mla_inputs", "query out", query_out, {n, s.heads, width});
  expect("mla_inputs", "rows out", rows_out, {n, width});
  expect_bank("mla_inputs", w_uk, s.heads, s.rank, s.nope);
  const Rope rope = make_rope("mla_inputs", inputs.table, inputs.positions, s);
  const nb::gil_scoped_release release;
  device.mla_inputs(
      {query.data(), kv.data(), weight.data(), query_out.data(), rows_out.data(), rope, s.heads, s.nope, s.rank, s.eps},
      w_uk, n);
}

void gqa_heads(Device& device, const In& x, const std::optional<In>& weight, const RopeInputs& inputs,
               const AttentionShape& s, const Out& out) {
  const std::int64_t n = rows_of("gqa_inputs", x), width = s.key_dim;
  require(x.ndim() == 2 && static_cast<std::int64_t>(x.shape(1)) % width == 0,
          "gqa_inputs: rows " + shape_text(x) + " are not whole heads of " + std::to_string(width));
  require(s.rope_dim <= width, "gqa_inputs: rope is wider than a head");
  expect("gqa_inputs", "positions", inputs.positions, {n});
  require(out.size() == x.size(), "gqa_inputs: out has " + std::to_string(out.size()) + " values");
  if (weight) expect("gqa_inputs", "norm weight", *weight, {width});
  const Rope rope = make_rope("gqa_inputs", inputs.table, inputs.positions, s);
  const nb::gil_scoped_release release;
  device.head_rows({x.data(), weight ? weight->data() : nullptr, out.data(), rope,
                    static_cast<std::int64_t>(x.shape(1)) / width, width, s.eps},
                   n);
}

// Reads an array as rows of `heads` equal heads and `exact` channels; float32, uint16 (bf16) or uint8 (int8 codes).
template <class A>
CacheRows cache_rows(const char* op, const A& array, std::int64_t heads, std::int64_t dim, std::int64_t exact) {
  require(array.ndim() == 2, std::string(op) + ": a cache stream is [slots, width], not " + shape_text(array));
  const auto width = static_cast<std::int64_t>(array.shape(1)), channels = heads * dim + exact;
  CacheRows rows{static_cast<const char*>(array.data()), CacheKind::f32, 0, heads, dim, exact};
  std::int64_t needed = channels;
  if (array.dtype() == nb::dtype<float>()) {
    rows.stride = 4 * width;
  } else if (array.dtype() == nb::dtype<std::uint16_t>()) {
    rows.kind = CacheKind::bf16;
    rows.stride = 2 * width;
  } else {
    require(array.dtype() == nb::dtype<std::uint8_t>(),
            std::string(op) + ": a cache stream is float32, uint16 (bf16) or uint8 (int8 rows)");
    rows.kind = CacheKind::int8;
    rows.stride = width;
    needed = heads * (dim + 4 * scale_groups(dim)) + 2 * exact;
  }
  require(width == needed, std::string(op) + ": a stream " + shape_text(array) + " has rows of " +
                               std::to_string(width) + ", needs " + std::to_string(needed) + " for " +
                               std::to_string(channels) + " channels");
  return rows;
}

void cache_write(Device& device, const MutableStream& cache, const In& rows, const Rows& slots, std::int64_t heads,
                 std::int64_t exact) {
  require(rows.ndim() == 2 && heads >= 1 && exact >= 0, "cache_write: rows are [T, channels] of at least one head");
  const std::int64_t n = rows_of("cache_write", rows), channels = static_cast<std::int64_t>(rows.shape(1));
  require(channels >= exact && (channels - exact) % heads == 0,
          "cache_write: rows " + shape_text(rows) + " are not " + std::to_string(heads) + " equal heads and " +
              std::to_string(exact) + " more");
  const CacheRows target = cache_rows("cache_write", cache, heads, (channels - exact) / heads, exact);
  expect("cache_write", "slot_mapping", slots, {n});
  expect_range("cache_write", "slot_mapping", slots, static_cast<std::int64_t>(cache.shape(0)));
  const nb::gil_scoped_release release;
  device.cache_write(target, rows.data(), slots.data(), n);
}

// Where a step's rows stand: `blocks` and `page_size` only with a cache.
struct Layout {
  Ids query_start;
  Ids positions;
  std::optional<Ids> blocks;
  std::int64_t page_size;
  std::optional<Rows> slots;

  Sequences sequences() const {
    return {query_start.data(), positions.data(), blocks ? blocks->data() : nullptr,
            blocks ? static_cast<std::int64_t>(blocks->shape(1)) : 0,
            static_cast<std::int64_t>(query_start.size()) - 1, 0, static_cast<std::int64_t>(positions.size())};
  }
};

void check_blocks(const Layout& layout, std::int64_t slots) {
  const std::int64_t limit = slots / layout.page_size, stride = static_cast<std::int64_t>(layout.blocks->shape(1));
  const std::int32_t* start = layout.query_start.data();
  for (std::int64_t s = 0; s + 1 < static_cast<std::int64_t>(layout.query_start.size()); ++s) {
    if (start[s] == start[s + 1]) continue;
    const std::int64_t first = layout.positions.data()[start[s]], last = layout.positions.data()[start[s + 1] - 1];
    require(first >= 0 && last - first == start[s + 1] - 1 - start[s],
            "attend: rows of sequence " + std::to_string(s) + " are not at consecutive positions");
    require(last / layout.page_size < stride, "attend: position " + std::to_string(last) + " of sequence " +
                                                  std::to_string(s) + " lies past its block table");
    for (std::int64_t b = 0; b <= last / layout.page_size; ++b) {
      const std::int64_t block = layout.blocks->data()[s * stride + b];
      require(block >= 0 && block < limit, "attend: block " + std::to_string(block) + " of sequence " +
                                               std::to_string(s) + " is not in [0, " + std::to_string(limit) + ")");
    }
  }
}

void check_layout(const Layout& layout, std::int64_t rows) {
  const std::int64_t count = rows_of("attend", layout.query_start) - 1;
  require(count >= 0 && layout.query_start.ndim() == 1, "attend: query_start is [S+1]");
  const std::int32_t* start = layout.query_start.data();
  require(start[0] == 0 && start[count] == rows, "attend: query_start does not span the rows");
  for (std::int64_t s = 0; s < count; ++s) require(start[s] <= start[s + 1], "attend: query_start falls");
  expect("attend", "positions", layout.positions, {rows});
  if (!layout.blocks) return;
  require(layout.blocks->ndim() == 2 && static_cast<std::int64_t>(layout.blocks->shape(0)) == count,
          "attend: block_tables is [S, blocks]");
  require(layout.page_size >= 1, "attend: page_size must be at least 1");
}

void attend(Device& device, const In& query, const Stream& keys, const std::optional<Stream>& values,
            const Layout& layout, const AttentionShape& s, const Out& out) {
  const std::int64_t n = rows_of("attend", query);
  require(s.groups >= 1 && s.heads % s.groups == 0, "attend: heads are no multiple of key heads");
  require(values || s.groups == 1, "attend: without values there is one key head");
  expect("attend", "query", query, {n, s.heads, s.key_dim});
  expect("attend", "out", out, {n, s.heads, s.value_dim});
  const std::int64_t exact = values ? 0 : s.key_dim - s.value_dim;
  require(exact >= 0, "attend: values are the first channels of the keys, " + std::to_string(s.value_dim) + " of " +
                          std::to_string(s.key_dim));
  const CacheRows key_rows = cache_rows("attend", keys, s.groups, s.key_dim - exact, exact);
  const CacheRows value_rows = values ? cache_rows("attend", *values, s.groups, s.value_dim, 0) : key_rows;
  require(value_rows.kind == key_rows.kind && (!values || values->shape(0) == keys.shape(0)),
          "attend: keys and values differ in kind or slots");
  check_layout(layout, n);
  if (layout.blocks) {
    check_blocks(layout, static_cast<std::int64_t>(keys.shape(0)));
  } else {
    require(static_cast<std::int64_t>(keys.shape(0)) == n, "attend: without a cache the keys are the step's own rows");
  }
  const AttentionArgs args{query.data(), key_rows, value_rows, out.data(), s.heads, s.groups, s.key_dim,
                           s.value_dim,  s.scale,  layout.page_size};
  const nb::gil_scoped_release release;
  device.attend(args, layout.sequences());
}

// ---- whole blocks ---------------------------------------------------------------------------------------------------

// Weights of a block as Python gave them; they live as long as this.
struct Linear {
  nb::object owner;
  const Bank* bank;
  std::optional<In> bias;

  Projection view() const { return {bank, bias ? bias->data() : nullptr}; }
};

void expect_linear(const char* name, const Linear& linear, std::int64_t rows, std::int64_t cols) {
  expect_bank(name, *linear.bank, 1, rows, cols);
  if (linear.bias) expect(name, "bias", *linear.bias, {rows});
}

struct LatentWeights {
  std::optional<Linear> q_a;
  std::optional<In> q_norm;
  Linear q_b, kv_a;
  In kv_norm;
  nb::object w_uk, w_uv;
  Linear o;
  In rope;
  AttentionShape shape;
};

struct GroupedWeights {
  Linear q, k, v, o;
  std::optional<In> q_norm, k_norm;
  In rope;
  AttentionShape shape;
};

// Input, norm and outputs of a call; `residual` and `total` come together.
struct Entry {
  In delta;
  std::optional<In> residual;
  In norm;
  float eps;
  Out out;
  std::optional<Out> total;
};

void check_latent(const LatentWeights& w) {
  const AttentionShape& s = w.shape;
  const std::int64_t hidden = w.kv_a.bank->cols(), q_in = w.q_a ? w.q_a->bank->rows() : hidden;
  const Bank &w_uk = nb::cast<const Bank&>(w.w_uk), &w_uv = nb::cast<const Bank&>(w.w_uv);
  require(w.q_a.has_value() == w.q_norm.has_value(), "latent_block: q_a and q_norm come together");
  if (w.q_a) expect_linear("latent_block: q_a", *w.q_a, q_in, hidden);
  if (w.q_norm) expect("latent_block", "q_norm", *w.q_norm, {q_in});
  expect_linear("latent_block: q_b", w.q_b, s.heads * (s.nope + s.rope_dim), q_in);
  expect_linear("latent_block: kv_a", w.kv_a, s.rank + s.rope_dim, hidden);
  expect("latent_block", "kv_norm", w.kv_norm, {s.rank});
  expect_bank("latent_block: w_uk", w_uk, s.heads, s.rank, s.nope);
  expect_bank("latent_block: w_uv", w_uv, s.heads, w_uv.rows(), s.rank);
  expect_linear("latent_block: o", w.o, hidden, s.heads * w_uv.rows());
}

void check_grouped(const GroupedWeights& w) {
  const AttentionShape& s = w.shape;
  const std::int64_t hidden = w.q.bank->cols();
  require(s.groups >= 1 && s.heads % s.groups == 0, "grouped_block: heads are no multiple of key heads");
  require(s.rope_dim <= s.key_dim, "grouped_block: rope is wider than a head");
  expect_linear("grouped_block: q", w.q, s.heads * s.key_dim, hidden);
  expect_linear("grouped_block: k", w.k, s.groups * s.key_dim, hidden);
  expect_linear("grouped_block: v", w.v, s.groups * s.value_dim, hidden);
  expect_linear("grouped_block: o", w.o, hidden, s.heads * s.value_dim);
  if (w.q_norm) expect("grouped_block", "q_norm", *w.q_norm, {s.key_dim});
  if (w.k_norm) expect("grouped_block", "k_norm", *w.k_norm, {s.key_dim});
}

BlockInput block_input(const Entry& entry, std::int64_t hidden) {
  const std::int64_t n = rows_of("attention block", entry.delta);
  expect("attention block", "delta", entry.delta, {n, hidden});
  expect("attention block", "norm", entry.norm, {hidden});
  expect("attention block", "out", entry.out, {n, hidden});
  require(entry.residual.has_value() == entry.total.has_value(), "attention block: residual and total come together");
  if (entry.residual) expect("attention block", "residual", *entry.residual, {n, hidden});
  if (entry.total) expect("attention block", "total", *entry.total, {n, hidden});
  return {entry.delta.data(), entry.residual ? entry.residual->data() : nullptr,
          entry.norm.data(),  entry.total ? entry.total->data() : nullptr,
          entry.eps,          n,
          hidden};
}

// Checks what `attend`, `cache_write` and the rope rely on.
BlockStep block_step(const Entry& entry, const Layout& layout, const In& rope, const AttentionShape& s,
                     const std::optional<MutableStream>& cache) {
  const std::int64_t n = rows_of("attention block", entry.delta);
  check_layout(layout, n);
  make_rope("attention block", rope, layout.positions, s);
  require(cache.has_value() == layout.blocks.has_value() && cache.has_value() == layout.slots.has_value(),
          "attention block: a cache comes with block tables and slots");
  BlockStep step{layout.sequences(), layout.page_size, nullptr, {}, {}, entry.out.data()};
  if (!cache) return step;
  require(cache->ndim() == 2, "attention block: a cache stream is [slots, width]");
  const auto slots = static_cast<std::int64_t>(cache->shape(0));
  check_blocks(layout, slots);
  expect("attention block", "slot_mapping", *layout.slots, {n});
  expect_range("attention block", "slot_mapping", *layout.slots, slots);
  step.slots = layout.slots->data();
  return step;
}

void latent_block(Device& device, const LatentWeights& w, const Entry& entry, const Layout& layout,
                  const std::optional<MutableStream>& cache) {
  const AttentionShape& s = w.shape;
  const BlockInput input = block_input(entry, w.kv_a.bank->cols());
  BlockStep step = block_step(entry, layout, w.rope, s, cache);
  if (cache) step.first = cache_rows("latent_block", *cache, 1, s.rank, s.rope_dim);
  const LatentBlock block{w.q_a ? w.q_a->view() : Projection{},
                          w.q_b.view(),
                          w.kv_a.view(),
                          w.o.view(),
                          w.q_norm ? w.q_norm->data() : nullptr,
                          w.kv_norm.data(),
                          &nb::cast<const Bank&>(w.w_uk),
                          &nb::cast<const Bank&>(w.w_uv),
                          w.rope.data(),
                          s.interleaved,
                          s.heads,
                          s.nope,
                          s.rank,
                          s.rope_dim,
                          s.scale,
                          s.eps};
  const nb::gil_scoped_release release;
  device.latent_block(block, input, step);
}

void grouped_block(Device& device, const GroupedWeights& w, const Entry& entry, const Layout& layout,
                   const std::optional<MutableStream>& keys, const std::optional<MutableStream>& values) {
  const AttentionShape& s = w.shape;
  const BlockInput input = block_input(entry, w.q.bank->cols());
  BlockStep step = block_step(entry, layout, w.rope, s, keys);
  require(keys.has_value() == values.has_value(), "grouped_block: keys and values come together");
  if (keys) {
    step.first = cache_rows("grouped_block", *keys, s.groups, s.key_dim, 0);
    step.second = cache_rows("grouped_block", *values, s.groups, s.value_dim, 0);
    require(step.first.kind == step.second.kind && keys->shape(0) == values->shape(0),
            "grouped_block: keys and values differ in kind or slots");
  }
  const GroupedBlock block{w.q.view(),
                           w.k.view(),
                           w.v.view(),
                           w.o.view(),
                           w.q_norm ? w.q_norm->data() : nullptr,
                           w.k_norm ? w.k_norm->data() : nullptr,
                           w.rope.data(),
                           s.interleaved,
                           s.heads,
                           s.groups,
                           s.key_dim,
                           s.value_dim,
                           s.rope_dim,
                           s.scale,
                           s.eps};
  const nb::gil_scoped_release release;
  device.grouped_block(block, input, step);
}

void bind_blocks(nb::module_& m, nb::class_<Device>& device) {
  nb::class_<Linear>(m, "Linear")
      .def(
          "__init__",
          [](Linear* self, nb::object bank, std::optional<In> bias) {
            const Bank& weight = nb::cast<const Bank&>(bank);
            new (self) Linear{bank, &weight, bias};
          },
          nb::arg("bank"), nb::arg("bias").noconvert().none());
  nb::class_<Entry>(m, "Entry")
      .def(
          "__init__",
          [](Entry* self, In delta, std::optional<In> residual, In norm, float eps, Out out,
             std::optional<Out> total) { new (self) Entry{delta, residual, norm, eps, out, total}; },
          nb::arg("delta").noconvert(), nb::arg("residual").noconvert().none(), nb::arg("norm").noconvert(),
          nb::arg("eps"), nb::arg("out").noconvert(), nb::arg("total").noconvert().none());
  nb::class_<LatentWeights>(m, "LatentWeights")
      .def(
          "__init__",
          [](LatentWeights* self, const Linear* q_a, std::optional<In> q_norm, const Linear& q_b, const Linear& kv_a,
             In kv_norm, nb::object w_uk, nb::object w_uv, const Linear& o, In rope, const AttentionShape& shape) {
            LatentWeights weights{q_a ? std::optional<Linear>(*q_a) : std::nullopt, q_norm, q_b, kv_a, kv_norm, w_uk,
                                  w_uv, o, rope, shape};
            check_latent(weights);
            new (self) LatentWeights(std::move(weights));
          },
          nb::kw_only(), nb::arg("q_a").none(), nb::arg("q_norm").noconvert().none(), "q_b"_a, "kv_a"_a,
          nb::arg("kv_norm").noconvert(), "w_uk"_a, "w_uv"_a, "o"_a, nb::arg("rope").noconvert(), "shape"_a);
  nb::class_<GroupedWeights>(m, "GroupedWeights")
      .def(
          "__init__",
          [](GroupedWeights* self, const Linear& q, const Linear& k, const Linear& v, const Linear& o,
             std::optional<In> q_norm, std::optional<In> k_norm, In rope, const AttentionShape& shape) {
            GroupedWeights weights{q, k, v, o, q_norm, k_norm, rope, shape};
            check_grouped(weights);
            new (self) GroupedWeights(std::move(weights));
          },
          nb::kw_only(), "q"_a, "k"_a, "v"_a, "o"_a, nb::arg("q_norm").noconvert().none(),
          nb::arg("k_norm").noconvert().none(), nb::arg("rope").noconvert(), "shape"_a);
  device
      .def("latent_block", &latent_block, nb::arg("weights"), nb::arg("entry"), nb::arg("layout"),
           nb::arg("cache").noconvert().none())
      .def("grouped_block", &grouped_block, nb::arg("weights"), nb::arg("entry"), nb::arg("layout"),
           nb::arg("keys").noconvert().none(), nb::arg("values").noconvert().none());
}

}  // namespace

void bind_attention(nb::module_& m, nb::class_<Device>& device) {
  nb::class_<AttentionShape>(m, "AttentionShape")
      .def(
          "__init__",
          [](AttentionShape* self, std::int64_t heads, std::int64_t groups, std::int64_t key_dim,
             std::int64_t value_dim, std::int64_t nope, std::int64_t rank, std::int64_t rope_dim, bool interleaved,
             float scale, float eps) {
            new (self) AttentionShape{heads, groups, key_dim, value_dim, nope, rank, rope_dim, interleaved, scale, eps};
          },
          nb::kw_only(), "heads"_a, "groups"_a, "key_dim"_a, "value_dim"_a, "nope"_a, "rank"_a, "rope_dim"_a,
          "interleaved"_a, "scale"_a, "eps"_a);

  nb::class_<RopeInputs>(m, "RopeInputs")
      .def(
          "__init__", [](RopeInputs* self, In table, Ids positions) { new (self) RopeInputs{table, positions}; },
          nb::arg("table").noconvert(), nb::arg("positions").noconvert());

  nb::class_<Layout>(m, "Layout")
      .def(
          "__init__",
          [](Layout* self, Ids query_start, Ids positions, std::optional<Ids> blocks, std::int64_t page_size,
             std::optional<Rows> slots) { new (self) Layout{query_start, positions, blocks, page_size, slots}; },
          nb::arg("query_start").noconvert(), nb::arg("positions").noconvert(), nb::arg("blocks").noconvert().none(),
          nb::arg("page_size"), nb::arg("slots").noconvert().none() = nb::none());

  bind_blocks(m, device);
  device
      .def("mla_inputs", &mla_inputs, nb::arg("query").noconvert(), nb::arg("kv").noconvert(), nb::arg("w_uk"),
           nb::arg("weight").noconvert(), nb::arg("rope"), nb::arg("shape"), nb::arg("query_out").noconvert(),
           nb::arg("rows_out").noconvert())
      .def("gqa_heads", &gqa_heads, nb::arg("x").noconvert(), nb::arg("weight").noconvert().none(), nb::arg("rope"),
           nb::arg("shape"), nb::arg("out").noconvert())
      .def("cache_write", &cache_write, nb::arg("cache").noconvert(), nb::arg("rows").noconvert(),
           nb::arg("slots").noconvert(), nb::arg("heads"), nb::arg("exact"))
      .def("attend", &attend, nb::arg("query").noconvert(), nb::arg("keys").noconvert(),
           nb::arg("values").noconvert().none(), nb::arg("layout"), nb::arg("shape"), nb::arg("out").noconvert());
}

}  // namespace coterie
