#include "planes/residuals.h"

#include <sys/mman.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <new>

namespace horovodish {

namespace {

// Zeros that take memory only where they are written: of a tensor, a rank may encode a part only.
std::shared_ptr<float> mapped_zeros(size_t count) {
  const size_t bytes = count * sizeof(float);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return {static_cast<float*>(memory), [bytes](float* mapped) { munmap(mapped, bytes); }};
}

}  // namespace

void Residuals::begin_use(Operation& operation) {
  const auto& [kind, share, error_feedback, start, owner] = operation.request->compression;
  const auto entry_of = [&](const Member& member) -> Entry& { return entries_[owner + '\t' + member.name]; };
  if (kind == CodecKind::none) return;
  uint64_t uses = 0;
  // A call without a name is the only one of its kind, so it has no uses to count.
  const bool is_counted =
      error_feedback || start > 0 || (kind == CodecKind::randomk && !is_unnamed(operation.request->name));
  if (is_counted) {
    uses = std::numeric_limits<uint64_t>::max();
    for (const Member& member : operation.request->members) {
      Entry& entry = entry_of(member);
      if (entry.dtype != member.dtype || entry.shape != member.shape) entry = {member.dtype, member.shape};
      uses = std::min(uses, entry.uses++);
    }
    if (uses < start) return;
  }
  operation.code_seed = std::hash<std::string>()(operation.request->name) + uses * 0x9e3779b97f4a7c15;
  if (!error_feedback) return;
  for (size_t i = 0; i < operation.buffers.size(); ++i) {
    const Member& member = operation.request->members[i];
    if (!is_floating(member.dtype) || member.count() == 0) continue;
    Entry& entry = entry_of(member);
    if (!entry.errors) entry.errors = mapped_zeros(static_cast<size_t>(member.count()));
    operation.buffers[i].errors = entry.errors;
  }
}

}  // namespace horovodish
