#include "planes/residuals.h"

#include <sys/mman.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <new>
#include <tuple>

namespace horovodish {

namespace {

// Zeros that take memory only where they are written, since a rank may encode only a part of a tensor.
std::shared_ptr<float> mapped_zeros(size_t count) {
  const size_t bytes = count * sizeof(float);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return {static_cast<float*>(memory), [bytes](float* mapped) { munmap(mapped, bytes); }};
}

}  // namespace

void Residuals::begin_use(Operation& operation) {
  const Compression& its = operation.request->compression;
  const auto& [error_feedback, share, start, owner] = std::tie(its.error_feedback, its.share, its.start, its.owner);
  const CodecKind kind = its.kind == CodecKind::automatic ? chosen_.value_or(CodecKind::none) : its.kind;
  const auto entry_of = [&](const Member& member) -> Entry& { return entries_[{owner, member.name}]; };
  if (its.kind == CodecKind::none) return;
  uint64_t uses = 0;
  // A call of allreduce keeps nothing, and its name may be new each time.
  const bool is_call = owner.empty() && !error_feedback && start == 0;
  const bool is_counted = !is_call || (kind == CodecKind::randomk && !is_unnamed(operation.request->name));
  if (is_counted) {
    uses = std::numeric_limits<uint64_t>::max();
    uint64_t recent_uses = 0;
    for (const Member& member : operation.request->members) {
      Entry& entry = entry_of(member);
      if (entry.dtype != member.dtype || entry.shape != member.shape) {
        entry = Entry();
        std::tie(entry.dtype, entry.shape, entry.label) = std::tie(member.dtype, member.shape, member.label);
      }
      uses = std::min(uses, entry.uses++);
      recent_uses = std::max(recent_uses, ++entry.recent_uses);
    }
    if (recent_uses == kUnused) drop_unused();
    if (uses < start || kind == CodecKind::none) return;
  }
  operation.codec = kind;
  const size_t bucket = std::hash<std::string>()(*operation.signature);
  operation.code_seed = std::hash<std::string>()(operation.request->name) + uses * 0x9e3779b97f4a7c15;
  for (size_t i = 0; i < operation.buffers.size(); ++i) {
    const Member& member = operation.request->members[i];
    if (!is_floating(member.dtype) || member.count() == 0) continue;
    Buffer& buffer = operation.buffers[i];
    if (is_call) {
      auto& figures = calls_[{kind, share}];
      if (!figures) figures = std::make_shared<CodeFigures>();
      buffer.figures = figures;
    } else {
      Entry& entry = entry_of(member);
      entry.compression = operation.request->compression;
      entry.compression.kind = kind;
      buffer.figures = entry.figures;
      // If no rank has a value, nobody takes the result, so the errors wait.
      const bool keeps = error_feedback && (operation.absent.empty() || !mask_bit(operation.absent, i));
      if (keeps) {
        buffer.errors_move = entry.errors && entry.bucket != bucket;
        if (!entry.errors) entry.errors = mapped_zeros(static_cast<size_t>(member.count()));
        buffer.errors = entry.errors;
        entry.bucket = bucket;
      }
    }
    ++buffer.figures->steps;
    if (buffer.figures->measures_norms()) buffer.figures->gradient_squares = buffer.figures->error_squares = 0;
  }
}

void Residuals::drop_unused() {
  std::erase_if(entries_, [](const auto& its) { return its.second.recent_uses == 0; });
  for (auto& [key, entry] : entries_) entry.recent_uses = 0;
}

bool Residuals::needs_choice(const Operation& operation) const {
  const Compression& compression = operation.request->compression;
  if (compression.kind != CodecKind::automatic || chosen_) return false;
  const auto& members = operation.request->members;
  return std::all_of(members.begin(), members.end(), [&](const Member& member) {
    const auto found = entries_.find({compression.owner, member.name});
    return (found == entries_.end() ? 0 : found->second.uses) >= compression.start;
  });
}

std::vector<Residuals::Report> Residuals::reports() const {
  std::vector<Report> reports;
  for (const auto& [key, entry] : entries_) {
    const Compression& its = entry.compression;
    const std::string& name = entry.label.empty() ? key.second : entry.label;
    if (entry.figures->steps > 0) reports.push_back({key.first, name, its.kind, its.share, *entry.figures});
  }
  for (const auto& [codec, figures] : calls_) reports.push_back({"", "", codec.first, codec.second, *figures});
  return reports;
}

}  // namespace horovodish
