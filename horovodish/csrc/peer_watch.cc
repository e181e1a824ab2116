#include "peer_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "thread_setup.h"

namespace horovodish {

PeerWatch::PeerWatch(std::vector<int> sockets, std::function<void()> on_loss)
    : sockets_(std::move(sockets)),
      on_loss_(std::move(on_loss)),
      gone_(std::make_unique<std::atomic<bool>[]>(sockets_.size())),
      stop_event_(eventfd(0, EFD_CLOEXEC)) {
  if (stop_event_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  thread_ = std::thread([this] { run(); });
}

PeerWatch::~PeerWatch() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(stop_event_, &one, sizeof one);
  thread_.join();
  close(stop_event_);
  for (const int socket : sockets_) {
    if (socket >= 0) close(socket);
  }
}

void PeerWatch::run() {
  set_up_thread("hvd-peer-watch");
  std::vector<pollfd> polled;
  for (const int socket : sockets_) polled.push_back({socket, POLLIN, 0});
  polled.push_back({stop_event_, POLLIN, 0});
  while (true) {
    if (poll(polled.data(), polled.size(), -1) < 0) continue;
    if (polled.back().revents != 0) return;
    bool lost = false;
    for (size_t peer = 0; peer < sockets_.size(); ++peer) {
      if (polled[peer].fd < 0 || polled[peer].revents == 0) continue;
      char byte;
      if (recv(polled[peer].fd, &byte, 1, MSG_DONTWAIT) > 0) continue;
      polled[peer].fd = -1;  // poll() ignores it from here on
      gone_[peer].store(true, std::memory_order_release);
      lost = true;
    }
    if (lost) on_loss_();
  }
}

}  // namespace horovodish
