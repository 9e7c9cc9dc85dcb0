// CRC-32C (Castagnoli, reflected, as in iSCSI and ext4) of bytes. With SSE4.2 three streams are interleaved, because the
// instruction has a latency of three cycles; the level is chosen at run time, a table serves every other processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace coterie {

// The checksum of `bytes`, continued from `crc` (0 to begin).
std::uint32_t crc32c(const unsigned char* bytes, std::size_t count, std::uint32_t crc = 0);

// The checksum of two byte strings end to end, from their own and the length of the second.
std::uint32_t crc32c_join(std::uint32_t first, std::uint32_t second, std::size_t second_count);

// The same by the table alone (tests).
std::uint32_t crc32c_table(const unsigned char* bytes, std::size_t count, std::uint32_t crc = 0);

}  // namespace coterie
