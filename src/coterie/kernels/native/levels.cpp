// Probing the processor. The amx level is used only after its products have been compared with the vector kernels' on
// this very machine: small matrices of every kind, many rows against one row at a time, bit for bit.
#include "levels.h"

#include <stdexcept>

#include "tile_check.h"

#if defined(COTERIE_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace coterie {

#if defined(COTERIE_X86)

namespace {

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

// Tiles, with int8 and bf16 products.
bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAll) == kAll;
}

KernelTable with_tiles(KernelTable table, const char* name, const TileKernels& tiles) {
  table.name = name;
  table.gemm = tiles.gemm;
  table.tile_attention = tiles.attention;
  table.tile_attention_floats = tiles.attention_floats;
  table.bf16_inputs = true;
  return table;
}

bool tiles_granted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

const KernelTable& amx_table() {
  static const KernelTable table = with_tiles(avx512::table, "amx", amx::tile_kernels);
  return table;
}

const KernelTable& emulated_table() {
  static const KernelTable table = with_tiles(avx512::table, "amx-emulated", amx_emulated::tile_kernels);
  return table;
}

// Why the amx level is not usable; empty if it is.
std::string amx_fault() {
  if (!tiles_granted()) return "the system does not grant this process the tile registers";
  const std::string kind = differing_kind(amx_table());
  return kind.empty() ? kind : "its " + kind + " products differ from the vector kernels' on this processor";
}

// Probed once.
const std::string* amx_state() {
  static const std::string fault = has_amx() ? amx_fault() : std::string();
  return has_amx() ? &fault : nullptr;
}

}  // namespace

std::vector<std::string> isa_levels() {
  std::vector<std::string> levels{"generic"};
  if (has_avx2()) levels.emplace_back("avx2");
  if (has_avx512()) levels.emplace_back("avx512");
  const std::string* amx = amx_state();
  if (amx && amx->empty()) levels.emplace_back("amx");
  return levels;
}

std::vector<std::pair<std::string, std::string>> refused_levels() {
  const std::string* amx = amx_state();
  if (amx && !amx->empty()) return {{"amx", *amx}};
  return {};
}

const KernelTable& level_table(const std::string& isa) {
  for (const std::string& level : isa_levels()) {
    if (level != isa) continue;
    if (isa == "amx") return amx_table();
    return isa == "avx512" ? avx512::table : isa == "avx2" ? avx2::table : generic::table;
  }
  if (isa == "amx-emulated" && has_avx512()) return emulated_table();
  throw std::invalid_argument("ISA level '" + isa + "' is not available on this processor");
}

#else

std::vector<std::string> isa_levels() {
  return {"generic"};
}

std::vector<std::pair<std::string, std::string>> refused_levels() {
  return {};
}

const KernelTable& level_table(const std::string& isa) {
  if (isa == "generic") return generic::table;
  throw std::invalid_argument("ISA level '" + isa + "' is not available on this processor");
}

#endif

}  // namespace coterie
