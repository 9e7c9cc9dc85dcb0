// pread in blocks: a thread takes the next block (of a large unit, or of several small ones), reads it and checks it while
// it is in its cache; the checksums of a large unit's blocks are joined at the end.
#include "disk.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>

#include "crc.h"

namespace coterie {

namespace {

constexpr std::int64_t kBlock = 1 << 20;  // bytes of one task: enough for a disk, small enough to share

class File {
 public:
  File(const std::string& path, bool direct) {
#ifdef O_DIRECT
    if (direct) fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    direct_ = fd_ >= 0;
#endif
    if (fd_ < 0) fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  }
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int fd() const { return fd_; }
  bool direct() const { return direct_; }

 private:
  int fd_ = -1;
  bool direct_ = false;
};

// errno of a failed read, -1 for an early end, 0 if all came.
int read_fully(int fd, unsigned char* target, std::int64_t bytes, std::int64_t offset) {
  while (bytes > 0) {
    const ssize_t got = ::pread(fd, target, static_cast<std::size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return -1;
    target += got, offset += got, bytes -= got;
  }
  return 0;
}

}  // namespace

double cached_fraction(const std::string& path) {
  const File file(path, false);
  struct stat facts {};
  if (file.fd() < 0 || ::fstat(file.fd(), &facts) != 0 || facts.st_size == 0) return 1;
  const auto bytes = static_cast<std::size_t>(facts.st_size), page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  void* mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.fd(), 0);
  if (mapped == MAP_FAILED) return 1;
  std::vector<unsigned char> pages((bytes + page - 1) / page);
  const bool known = ::mincore(mapped, bytes, pages.data()) == 0;
  ::munmap(mapped, bytes);
  const auto resident = std::count_if(pages.begin(), pages.end(), [](unsigned char flags) { return flags & 1; });
  return known ? static_cast<double>(resident) / static_cast<double>(pages.size()) : 1;
}

UnitResult read_units(Pool& pool, const UnitRead& read) {
  const File file(read.path, read.direct);
  if (file.fd() < 0) return {0, errno, false, false};
  std::mutex guard;
  UnitResult result;
  result.direct = file.direct();
  std::atomic<bool> failed{false};
  const auto fail = [&](std::int64_t unit, int error) {
    const std::lock_guard<std::mutex> lock(guard);
    if (result.unit < 0 || unit < result.unit) result.unit = unit, result.error = error;
    failed = true;
  };
  const std::int64_t blocks = (read.bytes + kBlock - 1) / kBlock;  // of a unit
  const std::int64_t step = std::max<std::int64_t>(1, kBlock / read.bytes);
  std::vector<std::uint32_t> found(static_cast<std::size_t>(read.count * blocks));
  parallel_for(pool, (read.count + step - 1) / step * blocks, [&](std::int64_t task) {
    if (failed) return;
    const std::int64_t first = task / blocks * step, block = task % blocks;
    const std::int64_t units = std::min(step, read.count - first);
    const std::int64_t begin = first * read.bytes + block * kBlock;
    const std::int64_t bytes = std::min(blocks > 1 ? kBlock : units * read.bytes, (first + units) * read.bytes - begin);
    const int error = read_fully(file.fd(), read.target + begin, bytes, read.offset + begin);
    if (error != 0) return fail(first, std::max(error, 0));
    const std::int64_t each = bytes / units;
    for (std::int64_t unit = 0; unit < units; ++unit) {
      const unsigned char* start = read.target + begin + unit * each;
      found[static_cast<std::size_t>((first + unit) * blocks + block)] = crc32c(start, static_cast<std::size_t>(each));
    }
  });
  for (std::int64_t unit = 0; unit < read.count && result.unit < 0; ++unit) {
    const std::uint32_t* parts = found.data() + unit * blocks;
    std::uint32_t crc = parts[0];
    for (std::int64_t block = 1; block < blocks; ++block) {
      crc = crc32c_join(crc, parts[block], static_cast<std::size_t>(std::min(kBlock, read.bytes - block * kBlock)));
    }
    if (crc != read.checksums[unit]) result.unit = unit, result.checksum = true;
  }
  return result;
}

}  // namespace coterie
