#include "memory/peer_deaths.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>

#include "memory/sleeping_process.h"

namespace horovodish {

PeerDeaths::PeerDeaths(std::vector<int> sockets, Doorbell& doorbell)
    : sockets_(std::move(sockets)),
      doorbell_(doorbell),
      gone_(std::make_unique<std::atomic<bool>[]>(sockets_.size())),
      stop_event_(eventfd(0, EFD_CLOEXEC)) {
  try {
    if (stop_event_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    for (const int socket : sockets_) polled_.push_back({socket, POLLIN, 0});
    polled_.push_back({stop_event_, POLLIN, 0});
    const bool has_peers = std::ranges::any_of(sockets_, [](int socket) { return socket >= 0; });
    if (has_peers) thread_ = std::thread([this] { run(); });
  } catch (...) {
    close_all();
    throw;
  }
}

PeerDeaths::~PeerDeaths() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(stop_event_, &one, sizeof one);
  if (thread_.joinable()) thread_.join();
  close_all();
}

void PeerDeaths::close_all() {
  if (stop_event_ >= 0) close(stop_event_);
  for (const int socket : sockets_) {
    if (socket >= 0) close(socket);
  }
}

void PeerDeaths::run() {
  const BackgroundThread background("hvd-peer-watch");
  while (true) {
    if (poll(polled_.data(), polled_.size(), -1) < 0) continue;
    if (polled_.back().revents != 0) return;
    for (size_t peer = 0; peer < sockets_.size(); ++peer) {
      if (polled_[peer].fd < 0 || polled_[peer].revents == 0) continue;
      char byte;
      if (recv(polled_[peer].fd, &byte, 1, MSG_DONTWAIT) > 0) continue;
      polled_[peer].fd = -1;  // poll() ignores it from here on
      set_gone(peer);
    }
  }
}

}  // namespace horovodish
