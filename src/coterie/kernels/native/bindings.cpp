// The Python edge: the extension module coterie.kernels._native. Every shape, type and index that a kernel relies on is
// checked here and said in the message; outputs are allocated by the caller (kernels/native.py). The GIL is released
// while an op computes. Arrays are C-contiguous numpy arrays: float32, int32 ids and positions, int64 orders and
// counts.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "bindings_attention.h"
#include "levels.h"
#include "probe.h"
#include "tile_check.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace coterie {

namespace {

struct RouteShape {
  std::int64_t top_k, groups, topk_groups;
  bool sigmoid, top2_sum, normalize, scale;
  float norm_epsilon, scaling;
};

void init_device(Device* self, int threads, const std::string& isa) {
  require(threads >= 1 && threads <= 1024, "threads must be in [1, 1024], not " + std::to_string(threads));
  new (self) Device(threads, level_table(isa));
}

// ---- products and rows ----------------------------------------------------------------------------------------------

void linear(Device& device, const In& x, const Bank& bank, const std::optional<In>& bias, const Out& out) {
  const std::int64_t n = rows_of("linear", x);
  expect_bank("linear", bank, 1, bank.rows(), bank.cols());
  expect("linear", "x", x, {n, bank.cols()});
  expect("linear", "out", out, {n, bank.rows()});
  if (bias) expect("linear", "bias", *bias, {bank.rows()});
  const nb::gil_scoped_release release;
  device.products({{x.data(), bank.cols(), bank.matrix(0), bias ? bias->data() : nullptr, out.data(), bank.rows(), n}});
}

void head_linear(Device& device, const In& x, const Bank& bank, const Out& out) {
  const std::int64_t n = rows_of("head_linear", x), heads = bank.count();
  expect("head_linear", "x", x, {n, heads, bank.cols()});
  expect("head_linear", "out", out, {n, heads, bank.rows()});
  const nb::gil_scoped_release release;
  device.per_head(x.data(), bank.cols(), bank, out.data(), bank.rows(), n);
}

void norm(Device& device, const In& x, const In& weight, float eps, const Out& out) {
  require(x.ndim() >= 1 && weight.ndim() == 1 && x.shape(x.ndim() - 1) == weight.shape(0),
          "norm: x is " + shape_text(x) + ", weight " + shape_text(weight));
  require(out.size() == x.size(), "norm: out has " + std::to_string(out.size()) + " values");
  const auto width = static_cast<std::int64_t>(weight.shape(0));
  const auto rows = static_cast<std::int64_t>(x.size()) / width;
  const nb::gil_scoped_release release;
  device.norm({x.data(), nullptr, weight.data(), out.data(), nullptr, width, eps}, rows);
}

void add_norm(Device& device, const In& delta, const In& residual, const In& weight, float eps, const Out& out,
              const Out& total) {
  const std::int64_t n = rows_of("add_norm", delta), width = rows_of("add_norm", weight);
  expect("add_norm", "weight", weight, {width});
  expect("add_norm", "delta", delta, {n, width});
  expect("add_norm", "residual", residual, {n, width});
  expect("add_norm", "out", out, {n, width});
  expect("add_norm", "total", total, {n, width});
  const nb::gil_scoped_release release;
  device.norm({delta.data(), residual.data(), weight.data(), out.data(), total.data(), width, eps}, n);
}

// ---- experts --------------------------------------------------------------------------------------------------------

void route(Device& device, const In& x, const Bank& gate, const std::optional<In>& bias, const RouteShape& s,
           const Array<std::int32_t>& ids, const Out& weights) {
  const std::int64_t n = rows_of("route", x), experts = gate.rows();
  expect_bank("route", gate, 1, experts, gate.cols());
  expect("route", "x", x, {n, gate.cols()});
  if (bias) expect("route", "correction bias", *bias, {experts});
  expect("route", "ids", ids, {n, s.top_k});
  expect("route", "weights", weights, {n, s.top_k});
  require(s.top_k >= 1 && s.top_k <= experts,
          "route: top_k " + std::to_string(s.top_k) + " of " + std::to_string(experts));
  require(s.groups <= 1 || (experts % s.groups == 0 && s.topk_groups >= 1 && s.topk_groups <= s.groups),
          "route: " + std::to_string(s.topk_groups) + " of " + std::to_string(s.groups) + " groups of " +
              std::to_string(experts) + " experts");
  const nb::gil_scoped_release release;
  device.route(x.data(), gate,
               {nullptr, bias ? bias->data() : nullptr, nullptr, nullptr, ids.data(), weights.data(), experts, s.top_k,
                s.groups > 1 ? s.groups : 1, s.topk_groups, s.sigmoid, s.top2_sum, s.normalize, s.scale, s.norm_epsilon,
                s.scaling},
               n);
}

// Counting sort of the T * K pairs by expert; stable.
void sort_by_expert(const Ids& ids, const Array<std::int64_t>& token, const Array<std::int64_t>& position,
                    const Array<std::int64_t>& counts) {
  require(ids.ndim() == 2, "sort_by_expert: expert_ids is [T, K]");
  const std::int64_t n = rows_of("sort_by_expert", ids), k = static_cast<std::int64_t>(ids.shape(1));
  const std::int64_t experts = rows_of("sort_by_expert", counts);
  expect("sort_by_expert", "token", token, {n * k});
  expect("sort_by_expert", "position", position, {n, k});
  expect_range("sort_by_expert", "expert_ids", ids, experts);
  sort_pairs(ids.data(), n, k, experts, token.data(), position.data(), counts.data());
}

// Rows of floats, or of bytes as pack_rows leaves them.
template <class T>
void experts(Device& device, const Array<const T>& rows, const Rows& counts, const Bank& gate_up, const Bank& down,
             const Out& out) {
  constexpr bool kPacked = sizeof(T) == 1;
  const std::int64_t n = rows_of("experts", rows), inner = down.cols();
  require(!kPacked || device.row_bytes(gate_up) > 0, "experts: these weights take rows of float32");
  expect("experts", "rows", rows, {n, kPacked ? device.row_bytes(gate_up) : gate_up.cols()});
  expect("experts", "counts", counts, {gate_up.count()});
  expect_bank("experts", gate_up, gate_up.count(), 2 * inner, gate_up.cols());
  expect_bank("experts", down, gate_up.count(), down.rows(), inner);
  require(gate_up.segments() == 2, "experts: gate_up must be allocated with 2 segments");
  expect("experts", "out", out, {n, down.rows()});
  std::int64_t total = 0;
  for (std::size_t e = 0; e < counts.size(); ++e) {
    require(counts.data()[e] >= 0, "experts: a negative count");
    total += counts.data()[e];
  }
  require(total == n, "experts: counts add up to " + std::to_string(total) + " for " + std::to_string(n) + " rows");
  const nb::gil_scoped_release release;
  if constexpr (kPacked) {
    device.packed_experts(rows.data(), counts.data(), gate_up, down, out.data());
  } else {
    device.experts(rows.data(), counts.data(), gate_up, down, out.data());
  }
}

void pack_rows(Device& device, const In& x, const Bank& gate_up, const Array<std::uint8_t>& out) {
  const std::int64_t n = rows_of("pack_rows", x), least = device.row_bytes(gate_up);
  expect("pack_rows", "x", x, {n, gate_up.cols()});
  require(least > 0, "pack_rows: these weights take rows of float32");
  require(out.ndim() == 2 && rows_of("pack_rows", out) == n && static_cast<std::int64_t>(out.shape(1)) >= least,
          "pack_rows: out has shape " + shape_text(out) + ", needs " + std::to_string(n) + " rows of at least " +
              std::to_string(least) + " bytes");
  const auto width = static_cast<std::int64_t>(out.shape(1));
  const nb::gil_scoped_release release;
  device.pack_rows(x.data(), n, gate_up, out.data(), width);
}

void gated(Device& device, const In& x, const Bank& gate_up, const Out& out) {
  const std::int64_t n = rows_of("gated", x);
  expect("gated", "x", x, {n, gate_up.cols()});
  require(gate_up.count() == 1 && gate_up.segments() == 2, "gated: gate_up must be one matrix with 2 segments");
  expect("gated", "out", out, {n, gate_up.rows() / 2});
  const nb::gil_scoped_release release;
  device.gated(x.data(), n, gate_up, out.data());
}

struct SharedExperts {
  const Bank* gate_up;
  const Bank* down;
  const Bank* gate;
};

void moe(Device& device, const In& x, const Ids& ids, const In& weights, const Bank& gate_up, const Bank& down,
         const std::optional<SharedExperts>& shared, const Array<std::int64_t>& counts, const Out& out, bool rounded) {
  const std::int64_t n = rows_of("moe", x), inner = down.cols(), hidden = gate_up.cols();
  require(ids.ndim() == 2, "moe: expert_ids is [T, K]");
  const std::int64_t k = static_cast<std::int64_t>(ids.shape(1));
  expect("moe", "x", x, {n, hidden});
  expect("moe", "expert_ids", ids, {n, k});
  expect("moe", "weights", weights, {n, k});
  expect("moe", "out", out, {n, down.rows()});
  expect("moe", "counts", counts, {gate_up.count()});
  expect_range("moe", "expert_ids", ids, gate_up.count());
  expect_bank("moe", gate_up, gate_up.count(), 2 * inner, hidden);
  expect_bank("moe", down, gate_up.count(), down.rows(), inner);
  require(gate_up.segments() == 2, "moe: gate_up must be allocated with 2 segments");
  require(down.segments() == 1, "moe: down must be allocated with 1 segment");
  if (shared) {
    const std::int64_t width = shared->down->cols();
    expect_bank("moe", *shared->gate_up, 1, 2 * width, hidden);
    expect_bank("moe", *shared->down, 1, down.rows(), width);
    require(shared->gate_up->segments() == 2, "moe: the shared gate_up must be allocated with 2 segments");
    require(shared->down->segments() == 1, "moe: the shared down must be allocated with 1 segment");
    if (shared->gate) expect_bank("moe", *shared->gate, 1, 1, hidden);
  }
  const nb::gil_scoped_release release;
  device.moe({x.data(), ids.data(), weights.data(), &gate_up, &down, shared ? shared->gate_up : nullptr,
              shared ? shared->down : nullptr, shared ? shared->gate : nullptr, out.data(), counts.data(), n, k,
              rounded ? RowType::rounded : RowType::f32});
}

template <class T>
void combine(Device& device, const Array<const T>& rows, const Rows& position, const In& weights,
             const std::optional<In>& shared, const Out& out, bool rounded) {
  require(rows.ndim() == 2 && position.ndim() == 2, "combine: rows is [M, H], position [T, K]");
  const std::int64_t n = rows_of("combine", position), k = static_cast<std::int64_t>(position.shape(1));
  const std::int64_t width = static_cast<std::int64_t>(rows.shape(1));
  expect("combine", "weights", weights, {n, k});
  expect("combine", "out", out, {n, width});
  if (shared) expect("combine", "shared", *shared, {n, width});
  expect_range("combine", "position", position, rows_of("combine", rows));
  const RowType type = sizeof(T) == 2 ? RowType::bf16 : rounded ? RowType::rounded : RowType::f32;
  const nb::gil_scoped_release release;
  device.combine({rows.data(), type, position.data(), weights.data(), shared ? shared->data() : nullptr, out.data(),
                  width, width, k},
                 n);
}

void narrow(Device& device, const In& rows, const Rows& take, const Array<std::uint16_t>& out) {
  require(rows.ndim() == 2, "narrow: rows is [M, H]");
  const std::int64_t n = rows_of("narrow", take), width = static_cast<std::int64_t>(rows.shape(1));
  expect("narrow", "take", take, {n});
  expect("narrow", "out", out, {n, width});
  expect_range("narrow", "take", take, rows_of("narrow", rows));
  const nb::gil_scoped_release release;
  device.narrow({rows.data(), take.data(), out.data(), width}, n);
}

void sigmoid_scale(Device& device, const In& x, const In& gate, const Out& out) {
  require(x.ndim() == 2, "sigmoid_scale: x is [T, H]");
  const std::int64_t n = rows_of("sigmoid_scale", x), width = static_cast<std::int64_t>(x.shape(1));
  expect("sigmoid_scale", "gate", gate, {n, 1});
  expect("sigmoid_scale", "out", out, {n, width});
  const nb::gil_scoped_release release;
  device.sigmoid_scale(x.data(), gate.data(), out.data(), n, width);
}

// ---- measuring the machine ------------------------------------------------------------------------------------------

std::vector<double> run_probe(Device& device, const std::string& kind, std::int64_t nbytes, int rounds) {
  require(rounds >= 1, "probe: at least one round");
  const nb::gil_scoped_release release;
  return probe(device.pool(), kind, nbytes, rounds);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native CPU kernels: see coterie.kernels.native.";
  m.def("isa_levels", &isa_levels);
  m.def("refused_levels", &refused_levels);
  m.def("differing_kind", [](const std::string& isa) { return differing_kind(level_table(isa)); }, "isa"_a);
  m.def("probe_kinds", &probe_kinds);
  m.def("sort_by_expert", &sort_by_expert, nb::arg("ids").noconvert(), nb::arg("token").noconvert(),
        nb::arg("position").noconvert(), nb::arg("counts").noconvert());


  nb::class_<RouteShape>(m, "RouteShape")
      .def(
          "__init__",
          [](RouteShape* self, std::int64_t top_k, std::int64_t groups, std::int64_t topk_groups, bool sigmoid,
             bool top2_sum, bool normalize, bool scale, float norm_epsilon, float scaling) {
            new (self)
                RouteShape{top_k, groups, topk_groups, sigmoid, top2_sum, normalize, scale, norm_epsilon, scaling};
          },
          nb::kw_only(), "top_k"_a, "groups"_a, "topk_groups"_a, "sigmoid"_a, "top2_sum"_a, "normalize"_a, "scale"_a,
          "norm_epsilon"_a, "scaling"_a);

  nb::class_<SharedExperts>(m, "SharedExperts")
      .def("__init__",
           [](SharedExperts* self, const Bank& gate_up, const Bank& down, const Bank* gate) {
             new (self) SharedExperts{&gate_up, &down, gate};
           },
           nb::arg("gate_up"), nb::arg("down"), nb::arg("gate").none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 4>());

  auto device = nb::class_<Device>(m, "Device");
  device
      .def("__init__", &init_device, "threads"_a, "isa"_a)
      .def_prop_ro("threads", &Device::threads)
      .def("progress", [](Device& device) { return device.pool().progress(); })
      .def_prop_ro("isa", [](const Device& device) { return device.table().name; })
      .def("linear", &linear, nb::arg("x").noconvert(), nb::arg("bank"), nb::arg("bias").noconvert().none(),
           nb::arg("out").noconvert())
      .def("head_linear", &head_linear, nb::arg("x").noconvert(), nb::arg("bank"), nb::arg("out").noconvert())
      .def("norm", &norm, nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("eps"),
           nb::arg("out").noconvert())
      .def("add_norm", &add_norm, nb::arg("delta").noconvert(), nb::arg("residual").noconvert(),
           nb::arg("weight").noconvert(), nb::arg("eps"), nb::arg("out").noconvert(), nb::arg("total").noconvert())
      .def("route", &route, nb::arg("x").noconvert(), nb::arg("gate"), nb::arg("bias").noconvert().none(),
           nb::arg("shape"), nb::arg("ids").noconvert(), nb::arg("weights").noconvert())
      .def("experts", &experts<float>, nb::arg("rows").noconvert(), nb::arg("counts").noconvert(), nb::arg("gate_up"),
           nb::arg("down"), nb::arg("out").noconvert())
      .def("experts", &experts<std::uint8_t>, nb::arg("rows").noconvert(), nb::arg("counts").noconvert(),
           nb::arg("gate_up"), nb::arg("down"), nb::arg("out").noconvert())
      .def("row_bytes", &Device::row_bytes, nb::arg("gate_up"))
      .def("pack_rows", &pack_rows, nb::arg("x").noconvert(), nb::arg("gate_up"), nb::arg("out").noconvert())
      .def("gated", &gated, nb::arg("x").noconvert(), nb::arg("gate_up"), nb::arg("out").noconvert())
      .def("moe", &moe, nb::arg("x").noconvert(), nb::arg("ids").noconvert(), nb::arg("weights").noconvert(),
           nb::arg("gate_up"), nb::arg("down"), nb::arg("shared").none(), nb::arg("counts").noconvert(),
           nb::arg("out").noconvert(), nb::arg("rounded"))
      .def("combine", &combine<float>, nb::arg("rows").noconvert(), nb::arg("position").noconvert(),
           nb::arg("weights").noconvert(), nb::arg("shared").noconvert().none(), nb::arg("out").noconvert(),
           nb::arg("rounded"))
      .def("combine", &combine<std::uint16_t>, nb::arg("rows").noconvert(), nb::arg("position").noconvert(),
           nb::arg("weights").noconvert(), nb::arg("shared").noconvert().none(), nb::arg("out").noconvert(),
           nb::arg("rounded"))
      .def("narrow", &narrow, nb::arg("rows").noconvert(), nb::arg("take").noconvert(), nb::arg("out").noconvert())
      .def("sigmoid_scale", &sigmoid_scale, nb::arg("x").noconvert(), nb::arg("gate").noconvert(),
           nb::arg("out").noconvert())
      .def("probe", &run_probe, "kind"_a, "nbytes"_a, "rounds"_a);
  bind_weights(m, device);
  bind_disk(m, device);
  bind_attention(m, device);
}

}  // namespace coterie
