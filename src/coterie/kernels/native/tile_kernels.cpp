// The products and the attention of the amx level, compiled twice: as `amx` with the tile instructions, as `amx_emulated` with Tiles in
// plain C++ for tests on processors that lack them. All else of that level is the avx512 level's.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "kernels.h"
#include "layout.h"

namespace coterie {
namespace COTERIE_ISA {
namespace {

#include "simd.h"

#include "gemm.h"
#include "rows.h"

#include "igemm.h"
#include "tiles.h"

#include "tile_gemm.h"

#include "attention_tile.h"

#include "attention.h"

#include "tile_attention.h"

}  // namespace

extern const TileKernels tile_kernels;
const TileKernels tile_kernels = {tile_gemm, tile_attention, tile_attention_floats};

}  // namespace COTERIE_ISA
}  // namespace coterie
