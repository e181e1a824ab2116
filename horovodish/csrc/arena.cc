#include "arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

namespace horovodish {

namespace {
constexpr size_t kPage = 4096;
constexpr size_t in_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
}  // namespace

size_t ArenaLayout::rings_offset() const { return in_pages(sizeof(RankHeader)); }
size_t ArenaLayout::counters_offset() const { return rings_offset() + in_pages(ranks * sizeof(ByteRing)); }
size_t ArenaLayout::slots_offset() const { return counters_offset() + in_pages(sizeof(StreamCounters)); }
size_t ArenaLayout::bytes() const { return slots_offset() + in_pages(slots * chunk_bytes); }

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

void Arena::ring_peers() const {
  for (size_t rank = 0; rank < ranks(); ++rank) {
    if (rank != own_) header(rank).doorbell.ring();
  }
}

}  // namespace horovodish
