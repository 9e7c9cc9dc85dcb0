// The inner kernels of one ISA level: compiled once per level with COTERIE_ISA set to its name (generic, avx2, avx512).
//
// Source is shared; what differs is the vector width of simd.h and the block sizes that go with it. No standard-library
// templates here: an inline function compiled for one level must never be linked into another.
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "kernels.h"
#include "layout.h"

namespace coterie {
namespace COTERIE_ISA {
namespace {

#include "simd.h"

#include "gemm.h"
#include "rows.h"

#include "igemm.h"
#include "quantize.h"

#include "attention_tile.h"

#include "attention.h"

}  // namespace

#define COTERIE_STRING_(x) #x
#define COTERIE_STRING(x) COTERIE_STRING_(x)

extern const KernelTable table;
const KernelTable table = {
    COTERIE_STRING(COTERIE_ISA), false, gemm, quantize_inputs, finish_inputs, quantize_row, norm, mla_rows, head_rows, attention,
    attention_merge, route, combine, narrow, silu_mul, sigmoid_scale, nullptr, nullptr,
};

}  // namespace COTERIE_ISA
}  // namespace coterie
