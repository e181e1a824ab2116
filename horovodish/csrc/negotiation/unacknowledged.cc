#include "negotiation/unacknowledged.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace horovodish {

void UnacknowledgedDecisions::add(std::variant<Fail, Forgotten> decided) {
  if (!acknowledged_.empty()) decided_.push_back(std::move(decided));
}

void UnacknowledgedDecisions::acknowledged_by(size_t child) {
  if (first_for(child) == decided_.size())
    throw std::runtime_error("control message: an acknowledgement without a decision");
  ++acknowledged_[child];
  if (*std::ranges::min_element(acknowledged_) == dropped_) return;
  decided_.pop_front();
  ++dropped_;
}

void UnacknowledgedDecisions::clear() {
  decided_.clear();
  dropped_ = 0;
  std::fill(acknowledged_.begin(), acknowledged_.end(), 0);
}

bool UnacknowledgedDecisions::has_failed(size_t child, std::string_view name, std::string_view signature) const {
  const auto begin = decided_.begin() + static_cast<std::ptrdiff_t>(first_for(child));
  return std::any_of(begin, decided_.end(), [&](const auto& decided) {
    const auto* failed = std::get_if<Fail>(&decided);
    return failed != nullptr && failed->ends(name, signature);
  });
}

const Forgotten* UnacknowledgedDecisions::forgotten(size_t child, TensorId id) const {
  const auto begin = decided_.begin() + static_cast<std::ptrdiff_t>(first_for(child));
  const auto found = std::find_if(begin, decided_.end(), [&](const auto& decided) {
    const auto* forgotten = std::get_if<Forgotten>(&decided);
    return forgotten != nullptr && forgotten->id == id;
  });
  return found == decided_.end() ? nullptr : &std::get<Forgotten>(*found);
}

}  // namespace horovodish
