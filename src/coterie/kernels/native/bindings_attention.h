// Adds the attention ops to the extension module. Declares only; see bindings_attention.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include "ops.h"

namespace coterie {

namespace nb = nanobind;

// Classes of the module and methods of Device.
void bind_attention(nb::module_& m, nb::class_<Device>& device);

}  // namespace coterie
