#include "engine/status_door.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <string_view>

#include "memory/sleeping_process.h"

namespace horovodish {

namespace {

// An asker that does not read the answer delays the others for at most this long.
constexpr timeval kPatience{.tv_sec = 1, .tv_usec = 0};
// A message from the supervisor to the launcher has 64 KiB, and the answer needs room in it.
constexpr size_t kMostStackBytes = 40'000;

bool is_of_this_user(int connection) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

}  // namespace

StatusDoor::StatusDoor(int listener, int stacks, int stack_signal, HoldPython hold_python,
                       std::function<std::string()> status)
    : listener_(listener),
      stacks_(stacks),
      stack_signal_(stack_signal),
      hold_python_(std::move(hold_python)),
      status_(std::move(status)) {
  thread_ = std::thread([this] { run(); });
}

StatusDoor::~StatusDoor() {
  shutdown(listener_, SHUT_RDWR);  // ends accept()
  thread_.join();
  close(listener_);
}

void StatusDoor::run() {
  const BackgroundThread background("hvd-status");
  if (stacks_ >= 0) {
    sigset_t own;
    sigemptyset(&own);
    sigaddset(&own, stack_signal_);
    pthread_sigmask(SIG_UNBLOCK, &own, nullptr);
  }
  while (true) {
    const int connection = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (connection < 0 && errno == EINVAL) return;
    if (connection < 0) {
      usleep(10'000);  // for example too many open files
      continue;
    }
    try {
      if (is_of_this_user(connection)) answer(connection);
    } catch (const std::exception&) {  // no memory: the asker sees the end of the connection
    }
    close(connection);
  }
}

void StatusDoor::answer(int connection) const {
  for (const int side : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    setsockopt(connection, SOL_SOCKET, side, &kPatience, sizeof kPatience);
  }
  char question = 0;
  if (recv(connection, &question, 1, 0) != 1) return;
  std::string text = status_();
  if (question == 'k' && stacks_ >= 0) {
    if (const std::string stacks = python_stacks(); !stacks.empty()) text += "stacks\n" + stacks;
  }
  for (std::string_view rest = text; !rest.empty();) {
    const ssize_t sent = send(connection, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;
    rest.remove_prefix(static_cast<size_t>(sent));
  }
}

// Only this thread gets the signal. On another thread it would interrupt a system call of the script. The handler reads
// the stacks of other threads, and would crash if they ran and changed their stacks meanwhile.
std::string StatusDoor::python_stacks() const {
  if (ftruncate(stacks_, 0) != 0 || lseek(stacks_, 0, SEEK_SET) != 0) return {};
  if (!hold_python_([this] { pthread_kill(pthread_self(), stack_signal_); })) return {};
  std::string text(kMostStackBytes, '\0');
  text.resize(static_cast<size_t>(std::max<ssize_t>(0, pread(stacks_, text.data(), text.size(), 0))));
  return text;
}

}  // namespace horovodish
