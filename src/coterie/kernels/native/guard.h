// forbid and allow: mark bytes that no one may touch, in AddressSanitizer builds; nothing otherwise. For memory that is
// handed out in pieces (arenas, scratch), whose borders the sanitizer cannot know. spoil: fills what no one wrote with
// NaN, so that reading it shows.
#pragma once

#include <cstddef>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace coterie {

#if defined(__SANITIZE_ADDRESS__)
inline void forbid(const void* memory, std::size_t bytes) {
  __asan_poison_memory_region(memory, bytes);
}
inline void allow(const void* memory, std::size_t bytes) {
  __asan_unpoison_memory_region(memory, bytes);
}
inline void spoil(void* memory, std::size_t bytes) {
  std::memset(memory, 0xff, bytes);
}
#else
inline void forbid(const void*, std::size_t) {}
inline void allow(const void*, std::size_t) {}
inline void spoil(void*, std::size_t) {}
#endif

}  // namespace coterie
