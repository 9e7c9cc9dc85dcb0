// The table, and the instruction where the processor has it. Streams are joined by multiplying with x^(8 * length) in
// GF(2): appending zero bytes to a message is linear in its checksum.
#include "crc.h"

#include <array>
#include <cstring>

#ifdef COTERIE_X86
#include <nmmintrin.h>
#endif

namespace coterie {

namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78u;

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Table make_table() {
  Table table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1u ? kPolynomial : 0u);
    table[0][i] = crc;
  }
  for (std::uint32_t i = 0; i < 256; ++i) {
    for (std::size_t k = 1; k < 8; ++k) table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 255u];
  }
  return table;
}

constexpr Table kTable = make_table();

std::uint64_t load(const unsigned char* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, 8);
  return word;
}

#ifdef COTERIE_X86

// The effect of `kStream` zero bytes on a checksum, a byte of it at a time.
constexpr std::size_t kStream = 1360;

using Shift = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr std::uint32_t after_zeros(std::uint32_t crc, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) crc = (crc >> 8) ^ kTable[0][crc & 255u];
  return crc;
}

Shift make_shift() {
  Shift shift{};
  for (std::size_t byte = 0; byte < 4; ++byte) {
    for (std::uint32_t i = 0; i < 256; ++i) shift[byte][i] = after_zeros(i << (8 * byte), kStream);
  }
  return shift;
}

std::uint32_t shifted(const Shift& shift, std::uint32_t crc) {
  return shift[0][crc & 255u] ^ shift[1][(crc >> 8) & 255u] ^ shift[2][(crc >> 16) & 255u] ^ shift[3][crc >> 24];
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(const unsigned char* bytes, std::size_t count,
                                                            std::uint32_t crc) {
  static const Shift shift = make_shift();
  std::uint64_t a = ~crc;
  for (; count >= 3 * kStream; bytes += 3 * kStream, count -= 3 * kStream) {
    std::uint64_t b = 0, c = 0;
    for (std::size_t i = 0; i < kStream; i += 8) {
      a = _mm_crc32_u64(a, load(bytes + i));
      b = _mm_crc32_u64(b, load(bytes + kStream + i));
      c = _mm_crc32_u64(c, load(bytes + 2 * kStream + i));
    }
    a = shifted(shift, static_cast<std::uint32_t>(a)) ^ b;
    a = shifted(shift, static_cast<std::uint32_t>(a)) ^ c;
  }
  for (; count >= 8; bytes += 8, count -= 8) a = _mm_crc32_u64(a, load(bytes));
  auto rest = static_cast<std::uint32_t>(a);
  for (; count > 0; ++bytes, --count) rest = _mm_crc32_u8(rest, *bytes);
  return ~rest;
}

#endif

}  // namespace

// Eight bytes at a time, little-endian words.
std::uint32_t crc32c_table(const unsigned char* bytes, std::size_t count, std::uint32_t crc) {
  crc = ~crc;
  for (; count >= 8; bytes += 8, count -= 8) {
    const std::uint64_t word = load(bytes) ^ crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kTable[7 - k][(word >> (8 * k)) & 255u];
  }
  for (; count > 0; ++bytes, --count) crc = (crc >> 8) ^ kTable[0][(crc ^ *bytes) & 255u];
  return ~crc;
}

// x^(8 * second_count) times `first` modulo the polynomial, by squaring; bit 31 is x^0.
std::uint32_t crc32c_join(std::uint32_t first, std::uint32_t second, std::size_t second_count) {
  const auto multiply = [](std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t bit = 0x80000000u; bit; bit >>= 1) {
      if (a & bit) product ^= b;
      b = (b >> 1) ^ (b & 1u ? kPolynomial : 0u);
    }
    return product;
  };
  std::uint32_t power = 0x00800000u;  // x^8
  for (; second_count > 0; second_count >>= 1) {
    if (second_count & 1) first = multiply(power, first);
    power = multiply(power, power);
  }
  return first ^ second;
}

std::uint32_t crc32c(const unsigned char* bytes, std::size_t count, std::uint32_t crc) {
#ifdef COTERIE_X86
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return crc32c_sse42(bytes, count, crc);
#endif
  return crc32c_table(bytes, count, crc);
}

}  // namespace coterie
