// Probe: what this machine can do at most, measured by the threads that do the work. For `coterie bench`.
//
// Reading and copying memory, and multiply-adds of each unit with operands in registers. A probe is no kernel: nothing
// it computes is used, and it picks the processor's best instructions whatever level the device was made for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pool.h"

namespace coterie {

// What can be measured on this processor: "read", "read_4k", "copy", "f32", "int8", then "amx_int8", "amx_bf16".
std::vector<std::string> probe_kinds();

// One rate per round, after an uncounted first one: bytes a second for memory (a copy counts both directions), else
// operations a second, a multiply-add being two. `nbytes`: the array that memory probes walk. Throws
// std::invalid_argument for an unknown kind or an array that cannot be had.
std::vector<double> probe(Pool& pool, const std::string& kind, std::int64_t nbytes, int rounds);

}  // namespace coterie
