#include "negotiation/unheard.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "negotiation/request.h"

namespace horovodish {

bool Failed::ends(std::string_view its_name, std::string_view signature) const {
  if (its_name == name) return true;
  return !families.empty() &&
         std::find(families.begin(), families.end(), Request::family_of(signature)) != families.end();
}

void Unheard::add(Decided decided) {
  if (!heard_.empty()) decided_.push_back(std::move(decided));
}

void Unheard::heard(size_t child) {
  if (first_for(child) == decided_.size()) throw std::runtime_error("control message: it answers no decision");
  ++heard_[child];
  if (*std::min_element(heard_.begin(), heard_.end()) == dropped_) return;
  decided_.pop_front();
  ++dropped_;
}

void Unheard::clear() {
  decided_.clear();
  dropped_ = 0;
  std::fill(heard_.begin(), heard_.end(), 0);
}

bool Unheard::has_failed(size_t child, std::string_view name, std::string_view signature) const {
  const auto begin = decided_.begin() + static_cast<std::ptrdiff_t>(first_for(child));
  return std::any_of(begin, decided_.end(), [&](const Decided& decided) {
    const auto* failed = std::get_if<Failed>(&decided);
    return failed != nullptr && failed->ends(name, signature);
  });
}

const Forgotten* Unheard::forgotten(size_t child, ResponseCache::Id id) const {
  const auto begin = decided_.begin() + static_cast<std::ptrdiff_t>(first_for(child));
  const auto found = std::find_if(begin, decided_.end(), [&](const Decided& decided) {
    const auto* forgotten = std::get_if<Forgotten>(&decided);
    return forgotten != nullptr && forgotten->id == id;
  });
  return found == decided_.end() ? nullptr : &std::get<Forgotten>(*found);
}

}  // namespace horovodish
