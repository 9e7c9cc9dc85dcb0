// The Python edge of what packed checkpoints need: checksums, reading units from disk, and how far a bank lies from the
// values it was filled with. Rules as in bindings.cpp.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bindings.h"
#include "crc.h"
#include "disk.h"

namespace coterie {

using namespace nb::literals;

namespace {

using Bytes = Array<const std::uint8_t>;
using Checksums = Array<const std::uint32_t>;

std::uint32_t checksum(const Bytes& bytes) {
  const nb::gil_scoped_release release;
  return crc32c(bytes.data(), bytes.size());
}

std::uint32_t checksum_by_table(const Bytes& bytes) {
  const nb::gil_scoped_release release;
  return crc32c_table(bytes.data(), bytes.size());
}

// (first bad unit or -1, errno, whether its checksum differs, whether the page cache was passed by)
nb::tuple read_bank(Device& device, Bank& bank, const std::string& path, std::int64_t offset,
                    const Checksums& checksums, bool direct) {
  expect("read_units", "checksums", checksums, {bank.count()});
  require(offset >= 0 && offset % kUnitAlignment == 0, "read_units: offset " + std::to_string(offset));
  UnitResult result;
  {
    const nb::gil_scoped_release release;
    result = read_units(device.pool(), {path, offset, bank.unit_bytes(), bank.count(), bank.arena()->data(),
                                        checksums.data(), direct});
  }
  return nb::make_tuple(result.unit, result.error, result.checksum, result.direct);
}

// Sums of squares of (held - values) and of values, over the rows [row, row + n) of a matrix.
nb::tuple measure(Device& device, const Bank& bank, std::int64_t index, std::int64_t row, const In& values) {
  const std::int64_t n = rows_of("measure", values), cols = bank.cols();
  expect("measure", "values", values, {n, cols});
  require(index >= 0 && index < bank.count() && row >= 0 && row + n <= bank.rows(),
          "measure: matrix " + std::to_string(index) + ", rows from " + std::to_string(row));
  std::vector<double> sums(static_cast<std::size_t>(2 * n));
  double error = 0, total = 0;
  {
    const nb::gil_scoped_release release;
    constexpr std::int64_t kRows = 16;
    parallel_for(device.pool(), (n + kRows - 1) / kRows, [&](std::int64_t task) {
      std::vector<float> held(static_cast<std::size_t>(cols));
      for (std::int64_t r = task * kRows; r < std::min(n, (task + 1) * kRows); ++r) {
        bank.unpack_row(index, row + r, held.data());
        const float* wanted = values.data() + r * cols;
        double off = 0, all = 0;
        for (std::int64_t k = 0; k < cols; ++k) {
          const double difference = static_cast<double>(held[static_cast<std::size_t>(k)]) - wanted[k];
          off += difference * difference;
          all += static_cast<double>(wanted[k]) * wanted[k];
        }
        sums[static_cast<std::size_t>(2 * r)] = off, sums[static_cast<std::size_t>(2 * r + 1)] = all;
      }
    });
    for (std::int64_t r = 0; r < n; ++r) {
      error += sums[static_cast<std::size_t>(2 * r)], total += sums[static_cast<std::size_t>(2 * r + 1)];
    }
  }
  return nb::make_tuple(error, total);
}

}  // namespace

void bind_disk(nb::module_& m, nb::class_<Device>& device) {
  m.def("cached_fraction", &cached_fraction, nb::arg("path"));
  m.def("crc32c", &checksum, nb::arg("bytes").noconvert());
  m.def("crc32c_table", &checksum_by_table, nb::arg("bytes").noconvert());
  device
      .def("read_units", &read_bank, nb::arg("bank"), nb::arg("path"), nb::arg("offset"),
           nb::arg("checksums").noconvert(), nb::arg("direct"))
      .def("measure", &measure, nb::arg("bank"), nb::arg("index"), nb::arg("row"), nb::arg("values").noconvert());
}

}  // namespace coterie
