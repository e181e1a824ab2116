#include "planes/mpi/schedule_run.h"

#include <algorithm>
#include <utility>

namespace horovodish {

namespace {
// How many transfers of a schedule are under way in each direction.
constexpr size_t kTransfers = 4;
}  // namespace

ScheduleRun::ScheduleRun(const MpiEnvironment& environment, Schedule schedule, std::byte* buffer, size_t item_bytes,
                         ReduceInto reduce_into, const std::byte* sent, std::function<void()> then)
    : environment_(environment),
      schedule_(std::move(schedule)),
      buffer_(buffer),
      sent_(sent == nullptr ? buffer : sent),
      item_(item_bytes),
      reduce_into_(std::move(reduce_into)),
      then_(std::move(then)),
      sends_(std::min(kTransfers, schedule_.sends.size()), Transfer{MpiRequest(environment.mpi), {}}),
      receives_(std::min(kTransfers, schedule_.receives.size()), Transfer{MpiRequest(environment.mpi), {}}) {}

void ScheduleRun::cancel_receives() noexcept {
  for (Transfer& transfer : receives_) transfer.request.cancel();
}

bool ScheduleRun::advance() {
  bool progressed = false;
  while (post_receive() || finish_receive() || finish_send() || start_send()) progressed = true;
  if (then_ && done()) std::exchange(then_, nullptr)();
  return progressed;
}

bool ScheduleRun::post_receive() {
  if (receives_posted_ == schedule_.receives.size() || receives_posted_ == receives_done_ + receives_.size())
    return false;
  const Receive& receive = schedule_.receives[receives_posted_];
  if (receive.then == Receive::Then::store && sends_done_ < receive.after) return false;
  Transfer& transfer = receives_[receives_posted_ % receives_.size()];
  std::byte* target = at(receive.begin);
  if (receive.then != Receive::Then::store) {
    transfer.staging.resize(std::max(transfer.staging.size(), receive.count * item_));
    target = transfer.staging.data();
  }
  transfer.request.receive(target, receive.count * item_, peer(receive.peer), environment_.tag);
  ++receives_posted_;
  return true;
}

bool ScheduleRun::finish_receive() {
  if (receives_done_ == receives_posted_) return false;
  const Receive& receive = schedule_.receives[receives_done_];
  if (sends_done_ < receive.after) return false;
  Transfer& transfer = receives_[receives_done_ % receives_.size()];
  if (!transfer.request.test()) return false;
  if (receive.then != Receive::Then::store) {
    reduce_into_(at(receive.begin), transfer.staging.data(), receive.count,
                 receive.then == Receive::Then::reduce_finish);
  }
  ++receives_done_;
  return true;
}

bool ScheduleRun::start_send() {
  if (sends_started_ == schedule_.sends.size() || sends_started_ == sends_done_ + sends_.size()) return false;
  const Send& send = schedule_.sends[sends_started_];
  if (receives_done_ < send.after) return false;
  sends_[sends_started_ % sends_.size()].request.send(sent_ + send.begin * item_, send.count * item_, peer(send.peer),
                                                      environment_.tag);
  ++sends_started_;
  return true;
}

bool ScheduleRun::finish_send() {
  if (sends_done_ == sends_started_ || !sends_[sends_done_ % sends_.size()].request.test()) return false;
  ++sends_done_;
  return true;
}

}  // namespace horovodish
