// The ISA levels: which of them this build holds and this processor runs, and the kernels of each. Not here: a choice
// among them (kernels/select.py).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace coterie {

// Usable levels, best last.
std::vector<std::string> isa_levels();

// Levels that the processor has and that are not used all the same, each with the reason.
std::vector<std::pair<std::string, std::string>> refused_levels();

// The kernels of a level of isa_levels(), or of "amx-emulated" where the processor runs avx512 (for tests). Throws
// invalid_argument for others.
const KernelTable& level_table(const std::string& isa);

}  // namespace coterie
