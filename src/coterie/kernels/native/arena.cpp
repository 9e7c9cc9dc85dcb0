// Mapping, huge pages and placement. On a machine with several NUMA nodes pages are interleaved: every thread reads
// every expert, so no node is nearer to all of them.
#include "arena.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <new>

#include "guard.h"

namespace coterie {

namespace {

constexpr std::size_t kHugePage = std::size_t{1} << 21;
constexpr std::size_t kBorder = 4096;  // never touched; a sanitizer build says so if it is

// Mask of the online NUMA nodes below 64, 0 if unknown. The file reads "0" or "0-1,4".
unsigned long node_mask() {
  std::FILE* file = std::fopen("/sys/devices/system/node/online", "r");
  if (!file) return 0;
  unsigned long mask = 0;
  unsigned first = 0, last = 0;
  int read;
  while ((read = std::fscanf(file, "%u-%u", &first, &last)) >= 1) {
    if (read == 1) last = first;
    for (unsigned node = first; node <= last && node < 64; ++node) mask |= 1ul << node;
    if (std::fgetc(file) != ',') break;
  }
  std::fclose(file);
  return mask;
}

void spread(void* memory, std::size_t bytes) {
#ifdef SYS_mbind
  constexpr int kInterleave = 3;
  const unsigned long mask = node_mask();
  if (mask & (mask - 1)) syscall(SYS_mbind, memory, bytes, kInterleave, &mask, 65ul, 0u);
#endif
}

}  // namespace

Arena::Arena(std::size_t bytes) : bytes_(std::max<std::size_t>(bytes, 64)) {
  const bool large = bytes_ >= 2 * kHugePage;
  mapped_ = (large ? bytes_ + kHugePage : bytes_) + kBorder;
  void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  base_ = data_ = static_cast<unsigned char*>(memory);
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  if (large) data_ = base_ + ((kHugePage - address % kHugePage) % kHugePage);
  forbid(data_ + bytes_, static_cast<std::size_t>(base_ + mapped_ - (data_ + bytes_)));
  if (!large) return;
#ifdef MADV_HUGEPAGE
  madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
  spread(data_, bytes_);
}

Arena::~Arena() {
  allow(base_, mapped_);
  munmap(base_, mapped_);
}

}  // namespace coterie
