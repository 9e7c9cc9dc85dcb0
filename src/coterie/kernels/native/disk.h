// Reads units of packed checkpoints from files into arenas and checks them, several units at a time on a device's pool.
// Not here: what a unit holds (bank.h), what the manifest says (model/packed_manifest.py).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pool.h"

namespace coterie {

// `bytes` of `count` units that lie back to back at `offset` of a file.
struct UnitRead {
  std::string path;
  std::int64_t offset, bytes, count;
  unsigned char* target;
  const std::uint32_t* checksums;  // CRC-32C of each unit
  bool direct;                     // past the page cache, if the file system allows it
};

// How it went: `unit` is the first bad unit, -1 if all are right. `error` is errno of a failed call, 0 for a file that
// ended early or, with `checksum`, a unit that differs from its checksum.
struct UnitResult {
  std::int64_t unit = -1;
  int error = 0;
  bool checksum = false;
  bool direct = false;
};

// Share of a file's pages that are in the page cache; 1 if it cannot be known.
double cached_fraction(const std::string& path);

UnitResult read_units(Pool& pool, const UnitRead& read);

}  // namespace coterie
