// The Python edge of weights: formats, banks and how they are filled and read. Rules as in bindings.cpp.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"

namespace coterie {

using namespace nb::literals;

namespace {

constexpr const char* kKindNames[] = {"f32", "bf16", "fp8", "int8", "code4", "affine4", "affine8"};

// ---- weights --------------------------------------------------------------------------------------------------------

Format make_format(const std::string& kind, std::int64_t group, const std::string& scale,
                   const std::vector<int>& table) {
  const std::vector<std::string> kinds(kKindNames, kKindNames + 7);
  const std::vector<std::string> scales{"f32", "f16", "bf16", "e8m0"};
  Format format;
  const auto k = std::find(kinds.begin(), kinds.end(), kind) - kinds.begin();
  const auto s = std::find(scales.begin(), scales.end(), scale) - scales.begin();
  require(k < 7, "weight kind '" + kind + "' is unknown");
  require(s < 4, "scale type '" + scale + "' is unknown");
  require(group == 0 || group == 16 || group == 32 || group == 64 || group == 128,
          "weight group " + std::to_string(group) + " is not 16, 32, 64, 128 or 0 (the row)");
  require(kind != "code4" || table.size() == 16, "code4 needs a table of 16 values");
  format.kind = static_cast<Kind>(k);
  format.group = group;
  format.scale = static_cast<ScaleType>(s);
  for (std::size_t i = 0; i < table.size(); ++i) {
    require(i < 16 && table[i] >= -128 && table[i] <= 127, "code4 needs a table of 16 int8 values");
    format.table[i] = static_cast<std::int8_t>(table[i]);
  }
  return format;
}

Matrix make_shape(std::int64_t rows, std::int64_t cols, std::int64_t segments, const Format& format) {
  require(rows >= 1 && cols >= 1, "allocate: rows and cols must be at least 1");
  require(segments >= 1 && rows % segments == 0, "allocate: " + std::to_string(rows) + " rows in " +
                                                     std::to_string(segments) + " segments");
  return describe(rows, cols, segments, format);
}

std::vector<Bank> allocate(std::int64_t count, const std::vector<Matrix>& shapes) {
  require(count >= 1 && !shapes.empty(), "allocate: count must be at least 1, with a matrix");
  return allocate_units(count, shapes);
}

// The memory of all units [count, bytes] that a bank's matrices lie in, as writable bytes.
nb::ndarray<nb::numpy, std::uint8_t> unit_memory(const Bank& bank) {
  auto* keep = new std::shared_ptr<Arena>(bank.arena());
  nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::shared_ptr<Arena>*>(p); });
  return {bank.arena()->data(),
          {static_cast<std::size_t>(bank.count()), static_cast<std::size_t>(bank.unit_bytes())},
          owner};
}

void check_rows(const char* op, const Bank& bank, std::int64_t index, std::int64_t row, std::int64_t n) {
  const std::string name(op);
  require(index >= 0 && index < bank.count(),
          name + ": matrix " + std::to_string(index) + " of " + std::to_string(bank.count()));
  require(row >= 0 && row + n <= bank.rows(), name + ": rows " + std::to_string(row) + " to " +
                                                  std::to_string(row + n) + " of a matrix with " +
                                                  std::to_string(bank.rows()));
}

void fill(Device& device, Bank& bank, std::int64_t index, std::int64_t row, const In& values) {
  const std::int64_t n = rows_of("fill", values);
  expect("fill", "values", values, {n, bank.cols()});
  check_rows("fill", bank, index, row, n);
  const nb::gil_scoped_release release;
  device.fill(bank, index, row, n, values.data());
}

void fill_bf16(Device& device, Bank& bank, std::int64_t index, std::int64_t row, const Array<const std::uint16_t>& bits) {
  const std::int64_t n = rows_of("fill_bf16", bits);
  require(!is_scaled(bank.kind()), "fill_bf16: the bank is neither f32 nor bf16");
  expect("fill_bf16", "bits", bits, {n, bank.cols()});
  check_rows("fill_bf16", bank, index, row, n);
  const nb::gil_scoped_release release;
  device.fill_bf16(bank, index, row, n, bits.data());
}

void fill_codes(Device& device, Bank& bank, std::int64_t index, std::int64_t row, const Array<const std::uint8_t>& codes,
                const In& scales, const std::optional<In>& mins) {
  const std::int64_t n = rows_of("fill_codes", codes), groups = bank.shape().groups;
  require(is_scaled(bank.kind()), "fill_codes: the bank has no codes");
  require(mins.has_value() == is_affine(bank.kind()), "fill_codes: mins are for affine kinds, and needed there");
  expect("fill_codes", "codes", codes, {n, bank.cols()});
  expect("fill_codes", "scales", scales, {n, groups});
  if (mins) expect("fill_codes", "mins", *mins, {n, groups});
  check_rows("fill_codes", bank, index, row, n);
  if (is_nibble(bank.kind())) expect_range("fill_codes", "codes", codes, 16);
  const nb::gil_scoped_release release;
  device.fill_codes(bank, index, row, n, {codes.data(), scales.data(), mins ? mins->data() : nullptr});
}

void read(Device& device, const Bank& bank, std::int64_t index, const Out& out) {
  expect("read", "out", out, {bank.rows(), bank.cols()});
  require(index >= 0 && index < bank.count(),
          "read: matrix " + std::to_string(index) + " of " + std::to_string(bank.count()));
  const nb::gil_scoped_release release;
  device.read(bank, index, out.data());
}

void embed(Device& device, const Bank& bank, const Ids& ids, const Out& out) {
  const std::int64_t n = rows_of("embed", ids);
  expect("embed", "token_ids", ids, {n});
  expect("embed", "out", out, {n, bank.cols()});
  expect_range("embed", "token_ids", ids, bank.rows());
  const nb::gil_scoped_release release;
  device.embed(bank, ids.data(), n, out.data());
}

}  // namespace

void bind_weights(nb::module_& m, nb::class_<Device>& device) {
  nb::class_<Format>(m, "Format")
      .def("__init__",
           [](Format* self, const std::string& kind, std::int64_t group, const std::string& scale,
              const std::vector<int>& table) { new (self) Format(make_format(kind, group, scale, table)); },
           "kind"_a, "group"_a, "scale"_a, "table"_a);

  nb::class_<Matrix>(m, "Matrix")
      .def("__init__",
           [](Matrix* self, std::int64_t rows, std::int64_t cols, std::int64_t segments, const Format& format) {
             new (self) Matrix(make_shape(rows, cols, segments, format));
           },
           "rows"_a, "cols"_a, "segments"_a, "format"_a)
      .def_prop_ro("nbytes", &matrix_bytes);

  m.def("allocate", &allocate, "count"_a, "matrices"_a);

  nb::class_<Bank>(m, "Bank")
      .def_prop_ro("count", &Bank::count)
      .def_prop_ro("rows", &Bank::rows)
      .def_prop_ro("cols", &Bank::cols)
      .def_prop_ro("segments", &Bank::segments)
      .def_prop_ro("groups", [](const Bank& bank) { return bank.shape().groups; })
      .def_prop_ro("kind", [](const Bank& bank) { return kKindNames[static_cast<int>(bank.kind())]; })
      .def("units", &unit_memory)
      .def_prop_ro("nbytes", &Bank::bytes);

  device
      .def("fill", &fill, nb::arg("bank"), nb::arg("index"), nb::arg("row"), nb::arg("values").noconvert())
      .def("fill_bf16", &fill_bf16, nb::arg("bank"), nb::arg("index"), nb::arg("row"), nb::arg("bits").noconvert())
      .def("fill_codes", &fill_codes, nb::arg("bank"), nb::arg("index"), nb::arg("row"), nb::arg("codes").noconvert(),
           nb::arg("scales").noconvert(), nb::arg("mins").noconvert().none())
      .def("read", &read, nb::arg("bank"), nb::arg("index"), nb::arg("out").noconvert())
      .def("embed", &embed, nb::arg("bank"), nb::arg("ids").noconvert(), nb::arg("out").noconvert());
}

}  // namespace coterie
