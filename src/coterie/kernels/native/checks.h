// Checks of the Python edge: each raises ValueError with what was given and what is needed. Included by bindings.cpp
// only.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "bank.h"

namespace coterie {

namespace nb = nanobind;

template <class T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
using In = Array<const float>;
using Out = Array<float>;
using Ids = Array<const std::int32_t>;
using Rows = Array<const std::int64_t>;
using Stream = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using MutableStream = nb::ndarray<nb::c_contig, nb::device::cpu>;

inline void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

template <class A>
std::string shape_text(const A& array) {
  std::string text = "[";
  for (std::size_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + "]";
}

// Raises unless `array` has exactly this shape.
template <class A>
void expect(const char* op, const char* name, const A& array, const std::vector<std::int64_t>& shape) {
  bool same = array.ndim() == shape.size();
  for (std::size_t i = 0; same && i < shape.size(); ++i) same = static_cast<std::int64_t>(array.shape(i)) == shape[i];
  if (same) return;
  std::string wanted = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) wanted += (i ? ", " : "") + std::to_string(shape[i]);
  throw std::invalid_argument(std::string(op) + ": " + name + " has shape " + shape_text(array) + ", needs " + wanted +
                              "]");
}

template <class A>
std::int64_t rows_of(const char* op, const A& array) {
  require(array.ndim() >= 1, std::string(op) + ": an array with no axes");
  return static_cast<std::int64_t>(array.shape(0));
}

template <class A>
void expect_range(const char* op, const char* name, const A& array, std::int64_t limit) {
  // One pass without branches first: a checkpoint's codes come through here, and the size is a product each time.
  const auto* values = array.data();
  const std::size_t size = array.size();
  using Value = std::remove_cv_t<std::remove_pointer_t<decltype(values)>>;
  const auto top = static_cast<Value>(std::min<std::int64_t>(limit - 1, std::numeric_limits<Value>::max()));
  bool bad = limit < 1 && size > 0;
  for (std::size_t i = 0; i < size; ++i) bad |= (values[i] > top) | (values[i] < Value{0});
  for (std::size_t i = 0; bad && i < size; ++i) {
    const std::int64_t value = values[i];
    if (value < 0 || value >= limit) {
      throw std::invalid_argument(std::string(op) + ": " + name + " holds " + std::to_string(value) +
                                  ", must be in [0, " + std::to_string(limit) + ")");
    }
  }
}

inline void expect_bank(const char* op, const Bank& bank, std::int64_t count, std::int64_t rows, std::int64_t cols) {
  if (bank.count() == count && bank.rows() == rows && bank.cols() == cols) return;
  throw std::invalid_argument(std::string(op) + ": bank holds " + std::to_string(bank.count()) + " matrices [" +
                              std::to_string(bank.rows()) + ", " + std::to_string(bank.cols()) + "], needs " +
                              std::to_string(count) + " of [" + std::to_string(rows) + ", " + std::to_string(cols) +
                              "]");
}

}  // namespace coterie
