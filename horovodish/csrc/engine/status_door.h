// Answers `horovodish status`, on a socket of the rank. The thread sleeps until somebody asks. It needs neither
// Python's lock nor the script's threads.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace horovodish {

using HoldPython = std::function<bool(const std::function<void()>&)>;

class StatusDoor {
 public:
  // `listener`: a listening Unix socket, which this closes. `stacks`: the file into which Python writes the stacks of
  // all threads on `stack_signal`; -1: none. `hold_python`: calls a function while no thread changes its Python stack.
  // `status`: gives the answer.
  StatusDoor(int listener, int stacks, int stack_signal, HoldPython hold_python, std::function<std::string()> status);
  ~StatusDoor();
  StatusDoor(const StatusDoor&) = delete;
  StatusDoor& operator=(const StatusDoor&) = delete;

 private:
  void run();
  void answer(int connection) const;
  std::string python_stacks() const;

  const int listener_, stacks_, stack_signal_;
  const HoldPython hold_python_;
  const std::function<std::string()> status_;
  std::thread thread_;
};

}  // namespace horovodish
