// Notices the death of a local peer by the end-of-file on the socket to it. A thread sleeps in poll() while nothing
// happens. (kill(pid, 0) would take a zombie for alive.)
#pragma once

#include <poll.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "memory/doorbell.h"

namespace horovodish {

class PeerDeaths {
 public:
  // `sockets`: by local rank, -1 for this rank. The destructor closes them, as does the constructor if it throws. The
  // watching thread rings `doorbell`, of this rank.
  PeerDeaths(std::vector<int> sockets, Doorbell& doorbell);
  ~PeerDeaths();

  bool gone(size_t peer) const { return gone_[peer].load(std::memory_order_acquire); }
  void set_gone(size_t peer) {
    gone_[peer].store(true, std::memory_order_release);
    doorbell_.ring_own();
  }

 private:
  void run();
  void close_all();

  std::vector<int> sockets_;
  std::vector<pollfd> polled_;  // only the thread uses it; it allocates nothing, as nobody could hear of a failure
  Doorbell& doorbell_;
  std::unique_ptr<std::atomic<bool>[]> gone_;
  int stop_event_;
  std::thread thread_;
};

}  // namespace horovodish
