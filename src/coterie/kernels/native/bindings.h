// The parts of the Python edge: each file binds the ops of one concern to the Device class.
#pragma once

#include "checks.h"
#include "ops.h"

namespace coterie {

void bind_weights(nb::module_& m, nb::class_<Device>& device);
void bind_disk(nb::module_& m, nb::class_<Device>& device);

}  // namespace coterie
