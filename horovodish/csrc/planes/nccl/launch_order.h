// The order of launches on this rank's GPU, for the operations of its process sets. It is the same on every rank:
// two communicators that are launched in different orders on two GPUs wait for each other for ever:
//
//     rank 0 launches set 1, then set 2: its GPU waits in set 1 for rank 1
//     rank 1 launches set 2, then set 1: its GPU waits in set 2 for rank 0
//
// So an operation needs a ticket. Tickets have the order of the decisions of the global process set. The global set's
// own operations have their places there. For another set, its first rank asks for a ticket, and the global set's root
// announces the ticket to all ranks.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <set>
#include <string>
#include <utility>

namespace horovodish {

class LaunchOrder {
 public:
  // Asks the root of the global set for a ticket for a decision of another process set.
  using Ask = std::function<void(int process_set, uint64_t decision)>;

  explicit LaunchOrder(Ask ask) : ask_(std::move(ask)) {}

  // A process set that can launch begins or ends. A ticket of an ended set would hold up all later ones.
  void open(int process_set) { open_.insert(process_set); }
  void close(int process_set) {
    open_.erase(process_set);
    std::erase_if(tickets_, [process_set](const auto& ticket) { return ticket.first == process_set; });
  }
  // Adds a ticket of the global set, or of a set of one rank: that set waits for nobody, so its place does not matter
  // to others.
  void add(int process_set, uint64_t decision) { tickets_.push_back({process_set, decision}); }
  void ask(int process_set, uint64_t decision) const { ask_(process_set, decision); }
  void announced(int process_set, uint64_t decision) {
    if (open_.contains(process_set)) add(process_set, decision);
  }
  bool is_next(int process_set, uint64_t decision) const {
    return !tickets_.empty() && tickets_.front() == std::pair(process_set, decision);
  }
  void launched() { tickets_.pop_front(); }
  // No more tickets are announced, for this reason.
  void end(const std::string& why) { ended_ = why; }
  const std::string& ended() const { return ended_; }  // empty: it has not ended

 private:
  const Ask ask_;
  std::set<int> open_;
  std::deque<std::pair<int, uint64_t>> tickets_;
  std::string ended_;
};

}  // namespace horovodish
