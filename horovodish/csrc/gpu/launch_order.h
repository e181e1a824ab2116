// In which order the operations of this rank's process sets are launched on its GPU: the same on every rank, because
// two communicators that are launched in different orders on two GPUs wait for each other for ever.
//
// The order is that of the decisions of the global process set. Its own operations have their places there; any other
// set's first rank asks for a *turn* for each operation, which is decided as well.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <utility>

namespace horovodish {

class LaunchOrder {
 public:
  void add(int process_set, uint64_t decision) { turns_.push_back({process_set, decision}); }
  bool is_next(int process_set, uint64_t decision) const {
    return !turns_.empty() && turns_.front() == std::pair(process_set, decision);
  }
  void launched() { turns_.pop_front(); }
  // The set has come to an end.
  void forget(int process_set) {
    std::erase_if(turns_, [process_set](const auto& turn) { return turn.first == process_set; });
  }
  // No more turns are given to sets other than the global one, for this reason.
  void end(const std::string& why) { ended_ = why; }
  const std::string& ended() const { return ended_; }  // empty: it has not

 private:
  std::deque<std::pair<int, uint64_t>> turns_;
  std::string ended_;
};

}  // namespace horovodish
