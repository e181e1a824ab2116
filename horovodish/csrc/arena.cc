#include "arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <system_error>

namespace horovodish {

namespace {
constexpr size_t kPage = 4096;
constexpr size_t in_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
}  // namespace

size_t ArenaLayout::region_bytes() const {
  return in_pages(ranks * sizeof(ByteRing)) + in_pages(sizeof(StreamCounters)) + in_pages(slots * chunk_bytes);
}
size_t ArenaLayout::rings_offset(size_t region) const { return in_pages(sizeof(RankHeader)) + region * region_bytes(); }
size_t ArenaLayout::counters_offset(size_t region) const {
  return rings_offset(region) + in_pages(ranks * sizeof(ByteRing));
}
size_t ArenaLayout::slots_offset(size_t region) const { return counters_offset(region) + in_pages(sizeof(StreamCounters)); }
size_t ArenaLayout::bytes() const { return rings_offset(regions); }

// A fresh memfd is all zeros, which is the initial state of every structure in it.
Arena::Arena(const std::vector<int>& descriptors, size_t own, const ArenaLayout& layout) : layout_(layout), own_(own) {
  for (const int descriptor : descriptors) {
    void* base = mmap(nullptr, layout.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (base == MAP_FAILED) {
      const int error = errno;
      for (std::byte* mapped : bases_) munmap(mapped, layout.bytes());
      throw std::system_error(error, std::generic_category(), "mapping the shared memory of a local rank");
    }
    // A forked child must not write into its parent's stream.
    madvise(base, layout.bytes(), MADV_DONTFORK);
    bases_.push_back(static_cast<std::byte*>(base));
  }
}

Arena::~Arena() {
  for (std::byte* base : bases_) munmap(base, layout_.bytes());
}

void Arena::clear(size_t region) const {
  std::memset(bases_[own_] + layout_.rings_offset(region), 0, layout_.slots_offset(region) - layout_.rings_offset(region));
}

}  // namespace horovodish
