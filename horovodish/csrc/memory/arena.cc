#include "memory/arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

namespace horovodish {

namespace {
constexpr size_t kPage = 4096;
constexpr size_t in_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
}  // namespace

size_t ArenaLayout::region_bytes() const {
  return in_pages(ranks * sizeof(ControlRing)) + in_pages(ranks * sizeof(TransferRing)) +
         in_pages(sizeof(StreamCounters)) + in_pages(slots * chunk_bytes);
}
size_t ArenaLayout::control_offset(size_t region) const { return in_pages(sizeof(Doorbell)) + region * region_bytes(); }
size_t ArenaLayout::transfers_offset(size_t region) const {
  return control_offset(region) + in_pages(ranks * sizeof(ControlRing));
}
size_t ArenaLayout::counters_offset(size_t region) const {
  return transfers_offset(region) + in_pages(ranks * sizeof(TransferRing));
}
size_t ArenaLayout::slots_offset(size_t region) const {
  return counters_offset(region) + in_pages(sizeof(StreamCounters));
}
size_t ArenaLayout::bytes() const { return control_offset(regions); }

std::shared_ptr<std::byte> map_memory(int descriptor, size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "mapping the shared memory of a local rank");
  }
  // A forked child must not write into its parent's stream.
  madvise(memory, bytes, MADV_DONTFORK);
  return {static_cast<std::byte*>(memory), [bytes](std::byte* mapped) { munmap(mapped, bytes); }};
}

Arena::Arena(std::vector<std::shared_ptr<std::byte>> memory, size_t own, const ArenaLayout& layout)
    : layout_(layout), own_(own), memory_(std::move(memory)) {}

Arena::~Arena() {
  if (!keeps_addresses_) return;
  for (const auto& memory : memory_) {
    static_cast<void>(new std::shared_ptr<std::byte>(memory));  // never unmapped
    mmap(memory.get(), layout_.bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
         -1, 0);
  }
}

void Arena::clear(size_t region) const {
  for (size_t to = 0; to < layout_.ranks; ++to) {
    control_ring(region, own_, to).clear();
    transfer_ring(region, own_, to).clear();
  }
  StreamCounters& own = counters(region, own_);
  own.published = own.reduced = own.released = 0;
}

}  // namespace horovodish
