// tile_check: whether a level's products of many rows have the bits of its products of single rows.
#pragma once

#include <string>

#include "kernels.h"

namespace coterie {

// The first kind of weights on narrow activations whose products differ, in words; empty if none does.
std::string differing_kind(const KernelTable& table);

}  // namespace coterie
