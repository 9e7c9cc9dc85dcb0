// Probes of memory and of the multipliers. Functions carry their instruction set as an attribute, so that this one file
// serves every processor; the choice is made at run time. On other architectures the compiler's vectors are used.
#include "probe.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#endif

namespace coterie {

namespace {

constexpr std::int64_t kChunk = 4 << 20;     // bytes of memory in one piece of work
constexpr int kChunksPerThread = 32;         // pieces of register work
constexpr std::size_t kHugePage = 2u << 20;

// Results end here, so that no loop is optimised away.
std::atomic<std::uint64_t> sink{0};

// One multiplier: `run` does `steps` steps of `ops` operations each in registers.
struct Unit {
  const char* name;
  void (*run)(std::int64_t steps);
  std::int64_t steps;
  double ops;
};

// ---- reading --------------------------------------------------------------------------------------------------------

using Reader = std::uint64_t (*)(const char* data, std::int64_t bytes);

std::uint64_t read_generic(const char* data, std::int64_t bytes) {
  std::uint64_t sum[8] = {};
  for (std::int64_t at = 0; at + 64 <= bytes; at += 64) {
    std::uint64_t words[8];
    std::memcpy(words, data + at, 64);
    for (int i = 0; i < 8; ++i) sum[i] ^= words[i];
  }
  return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}

#if defined(__x86_64__)

[[gnu::target("avx2")]] std::uint64_t read_avx2(const char* data, std::int64_t bytes) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (std::int64_t at = 0; at + 128 <= bytes; at += 128) {
    const auto* from = reinterpret_cast<const __m256i*>(data + at);
    _mm_prefetch(data + at + 1024, _MM_HINT_T0);
    _mm_prefetch(data + at + 1088, _MM_HINT_T0);
    a = _mm256_xor_si256(a, _mm256_loadu_si256(from));
    b = _mm256_xor_si256(b, _mm256_loadu_si256(from + 1));
    c = _mm256_xor_si256(c, _mm256_loadu_si256(from + 2));
    d = _mm256_xor_si256(d, _mm256_loadu_si256(from + 3));
  }
  a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
  return static_cast<std::uint64_t>(_mm256_extract_epi64(a, 0) ^ _mm256_extract_epi64(a, 1) ^
                                    _mm256_extract_epi64(a, 2) ^ _mm256_extract_epi64(a, 3));
}

[[gnu::target("avx512f")]] std::uint64_t read_avx512(const char* data, std::int64_t bytes) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (std::int64_t at = 0; at + 256 <= bytes; at += 256) {
    for (int line = 0; line < 4; ++line) _mm_prefetch(data + at + 2048 + line * 64, _MM_HINT_T0);
    a = _mm512_xor_si512(a, _mm512_loadu_si512(data + at));
    b = _mm512_xor_si512(b, _mm512_loadu_si512(data + at + 64));
    c = _mm512_xor_si512(c, _mm512_loadu_si512(data + at + 128));
    d = _mm512_xor_si512(d, _mm512_loadu_si512(data + at + 192));
  }
  a = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
  return static_cast<std::uint64_t>(_mm512_reduce_add_epi64(a));
}

#endif

Reader reader() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return read_avx512;
  if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
  return read_generic;
}

// ---- multipliers ----------------------------------------------------------------------------------------------------

// Independent sums: enough to hide the latency of two units. They start apart, or the compiler would keep one of them.
constexpr int kChains = 12;

using Floats = float __attribute__((vector_size(16)));

void f32_generic(std::int64_t steps) {
  Floats sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = Floats{} + static_cast<float>(i);
  const Floats a = {1.5f, 1.5f, 1.5f, 1.5f}, b = a * 0.25f;
  for (std::int64_t step = 0; step < steps; ++step) {
    for (Floats& sum : sums) sum = sum * b + a;
  }
  for (const Floats& sum : sums) sink += static_cast<std::uint64_t>(sum[0]);
}

void int8_generic(std::int64_t steps) {
  using Words = std::int16_t __attribute__((vector_size(16)));
  Words sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = Words{} + static_cast<std::int16_t>(i);
  const Words a = {3, 3, 3, 3, 3, 3, 3, 3};
  for (std::int64_t step = 0; step < steps; ++step) {
    for (Words& sum : sums) sum = sum * a + a;
  }
  for (const Words& sum : sums) sink += static_cast<std::uint64_t>(sum[0]);
}

#if defined(__x86_64__)

[[gnu::target("avx2,fma")]] void f32_avx2(std::int64_t steps) {
  __m256 sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = _mm256_set1_ps(static_cast<float>(i));
  const __m256 a = _mm256_set1_ps(0.25f), b = _mm256_set1_ps(1.5f);
  for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = _mm256_fmadd_ps(sums[i], a, b);
  }
  for (const __m256& sum : sums) sink += static_cast<std::uint64_t>(_mm256_cvtss_f32(sum));
}

[[gnu::target("avx512f")]] void f32_avx512(std::int64_t steps) {
  __m512 sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  const __m512 a = _mm512_set1_ps(0.25f), b = _mm512_set1_ps(1.5f);
  for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_fmadd_ps(sums[i], a, b);
  }
  for (const __m512& sum : sums) sink += static_cast<std::uint64_t>(_mm512_cvtss_f32(sum));
}

// Exact 8-bit products without VNNI: widened to 16 bits, pairs added in 32 (pmaddubsw saturates).
[[gnu::target("avx2")]] void int8_avx2(std::int64_t steps) {
  __m256i sums[kChains];
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  __m256i a = _mm256_set1_epi16(static_cast<short>(steps)), b = _mm256_set1_epi16(3);
  for (std::int64_t step = 0; step < steps; ++step) {
    asm volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      __m256i product = _mm256_madd_epi16(a, b);
      asm volatile("" : "+x"(product));  // the same product every time: keep it from being shared
      sums[i] = _mm256_add_epi32(sums[i], product);
    }
  }
  for (const __m256i& sum : sums) sink += static_cast<std::uint64_t>(_mm256_extract_epi64(sum, 0));
}

[[gnu::target("avx512f,avx512vnni")]] void int8_vnni(std::int64_t steps) {
  __m512i sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_epi32(i);
  const __m512i a = _mm512_set1_epi8(5), b = _mm512_set1_epi8(3);
  for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
  }
  for (const __m512i& sum : sums) sink += static_cast<std::uint64_t>(_mm512_reduce_add_epi32(sum));
}

// ---- AMX: four sums of 16 x 16 from two tiles each way ----------------------------------------------------------------

struct TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

[[gnu::target("amx-tile")]] void configure_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  // gcc 12 tells the optimiser of 8 of the 64 bytes only; without the clobber it may drop the other stores.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
}

[[gnu::target("amx-tile,amx-int8")]] void amx_int8(std::int64_t steps) {
  configure_tiles();
  for (std::int64_t step = 0; step < steps; ++step) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_release();
}

[[gnu::target("amx-tile,amx-bf16")]] void amx_bf16(std::int64_t steps) {
  configure_tiles();
  for (std::int64_t step = 0; step < steps; ++step) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;

// Whether the processor has the tiles and the system lets this process use them.
bool has_amx(unsigned unit) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kAmxTile) == 0 || (d & unit) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#endif

std::vector<Unit> units() {
#if defined(__x86_64__)
  std::vector<Unit> found;
  const bool wide = __builtin_cpu_supports("avx512f");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (wide) found.push_back({"f32", f32_avx512, 200'000, kChains * 16 * 2});
  else if (avx2) found.push_back({"f32", f32_avx2, 200'000, kChains * 8 * 2});
  else found.push_back({"f32", f32_generic, 200'000, kChains * 4 * 2});
  if (wide && __builtin_cpu_supports("avx512vnni")) found.push_back({"int8", int8_vnni, 200'000, kChains * 64 * 2});
  else if (avx2) found.push_back({"int8", int8_avx2, 200'000, kChains * 16 * 2});
  else found.push_back({"int8", int8_generic, 200'000, kChains * 8 * 2});
  if (has_amx(kAmxInt8)) found.push_back({"amx_int8", amx_int8, 20'000, 4.0 * 16 * 16 * 64 * 2});
  if (has_amx(kAmxBf16)) found.push_back({"amx_bf16", amx_bf16, 20'000, 4.0 * 16 * 16 * 32 * 2});
  return found;
#else
  return {{"f32", f32_generic, 200'000, kChains * 4 * 2}, {"int8", int8_generic, 200'000, kChains * 8 * 2}};
#endif
}

// ---- running --------------------------------------------------------------------------------------------------------

// Anonymous memory, written once by the pool's threads; huge pages where the system gives them.
class Memory {
 public:
  Memory(Pool& pool, std::int64_t bytes, bool huge) : bytes_(bytes) {
    void* at = mmap(nullptr, static_cast<std::size_t>(bytes) + kHugePage, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::invalid_argument("probe: no memory for an array of " + std::to_string(bytes));
    base_ = at;
    const auto address = reinterpret_cast<std::uintptr_t>(at);
    data_ = reinterpret_cast<char*>((address + kHugePage - 1) / kHugePage * kHugePage);
#if defined(__linux__)
    madvise(data_, static_cast<std::size_t>(bytes), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
    (void)huge;
#endif
    parallel_for(pool, bytes / kChunk, [&](std::int64_t chunk) { std::memset(data_ + chunk * kChunk, 1, kChunk); });
  }
  ~Memory() { munmap(base_, static_cast<std::size_t>(bytes_) + kHugePage); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }

 private:
  std::int64_t bytes_;
  void* base_ = nullptr;
  char* data_ = nullptr;
};

template <class F>
std::vector<double> rates(double amount, int rounds, F body) {
  std::vector<double> result;
  for (int round = 0; round <= rounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    body();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (round > 0) result.push_back(amount / seconds.count());
  }
  return result;
}

std::vector<double> probe_read(Pool& pool, std::int64_t chunks, int rounds, bool huge) {
  const Memory memory(pool, chunks * kChunk, huge);
  const Reader read = reader();
  return rates(static_cast<double>(chunks * kChunk), rounds, [&] {
    parallel_for(pool, chunks, [&](std::int64_t chunk) { sink += read(memory.data() + chunk * kChunk, kChunk); });
  });
}

std::vector<double> probe_copy(Pool& pool, std::int64_t chunks, int rounds) {
  const std::int64_t half = chunks / 2;
  const Memory memory(pool, 2 * half * kChunk, true);
  return rates(static_cast<double>(2 * half * kChunk), rounds, [&] {
    parallel_for(pool, half, [&](std::int64_t chunk) {
      std::memcpy(memory.data() + (half + chunk) * kChunk, memory.data() + chunk * kChunk, kChunk);
    });
  });
}

}  // namespace

std::vector<std::string> probe_kinds() {
  std::vector<std::string> kinds{"read", "read_4k", "copy"};
  for (const Unit& unit : units()) kinds.emplace_back(unit.name);
  return kinds;
}

std::vector<double> probe(Pool& pool, const std::string& kind, std::int64_t nbytes, int rounds) {
  const std::int64_t chunks = nbytes / kChunk;
  if (kind == "read" || kind == "read_4k" || kind == "copy") {
    if (chunks < 2) throw std::invalid_argument("probe: give an array of at least " + std::to_string(2 * kChunk));
    return kind == "copy" ? probe_copy(pool, chunks, rounds) : probe_read(pool, chunks, rounds, kind == "read");
  }
  for (const Unit& unit : units()) {
    if (kind != unit.name) continue;
    const std::int64_t pieces = static_cast<std::int64_t>(pool.threads()) * kChunksPerThread;
    const double amount = unit.ops * static_cast<double>(unit.steps * pieces);
    return rates(amount, rounds, [&] { parallel_for(pool, pieces, [&](std::int64_t) { unit.run(unit.steps); }); });
  }
  throw std::invalid_argument("probe: '" + kind + "' is unknown or not to be had on this processor");
}

}  // namespace coterie
