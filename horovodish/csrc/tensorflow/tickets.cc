#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "tensorflow/executions.h"

namespace horovodish::tensorflow {

namespace {

// How long a look occupies a thread of TensorFlow, which other operations may need.
constexpr std::chrono::milliseconds kLook{1};

struct Ticket {
  Ticket(const Submission& call, TF_OpKernelContext* context, Status& status)
      : work(call, context, Work::Results::held, status) {}

  Work work;
  std::mutex mutex;
  std::condition_variable settled;
  std::shared_ptr<const Handle> handle;  // null until it is settled; guarded by mutex
};

class Tickets {
 public:
  int64_t add(std::shared_ptr<Ticket> ticket) {
    std::lock_guard lock(mutex_);
    tickets_[++last_] = std::move(ticket);
    return last_;
  }

  std::shared_ptr<Ticket> get(int64_t number, bool remove) {
    std::lock_guard lock(mutex_);
    const auto found = tickets_.find(number);
    if (found == tickets_.end()) return nullptr;
    auto ticket = found->second;
    if (remove) tickets_.erase(found);
    return ticket;
  }

 private:
  std::mutex mutex_;
  int64_t last_ = 0;                                                // guarded by mutex_
  std::unordered_map<int64_t, std::shared_ptr<Ticket>> tickets_;  // guarded by mutex_
};

Tickets& tickets() {
  static auto* const all = new Tickets;
  return *all;
}

// The ticket is the last input.
std::shared_ptr<Ticket> ticket_of(TF_OpKernelContext* context, bool remove) {
  Status status;
  const TensorPtr number = input(context, TF_NumInputs(context) - 1, status);
  if (!status.ok()) {
    TF_OpKernelContext_Failure(context, status.get());
    return nullptr;
  }
  auto ticket = tickets().get(*static_cast<const int64_t*>(TF_TensorData(number.get())), remove);
  if (!ticket) fail(context, TF_FAILED_PRECONDITION, "the results of this operation have been taken already");
  return ticket;
}

}  // namespace

void submit_for_ticket(void* kernel, TF_OpKernelContext* context) {
  Status status;
  const auto ticket = std::make_shared<Ticket>(*static_cast<const Submission*>(kernel), context, status);
  TensorPtr number;
  if (status.ok()) number.reset(TF_AllocateOutput(context, 0, TF_INT64, nullptr, 0, sizeof(int64_t), status.get()));
  if (!status.ok()) {
    TF_OpKernelContext_Failure(context, status.get());
    return;
  }
  *static_cast<int64_t*>(TF_TensorData(number.get())) = tickets().add(ticket);
  ticket->work.submit(ticket, [ticket](const auto& handle) {
    std::lock_guard lock(ticket->mutex);
    ticket->handle = handle;
    ticket->settled.notify_all();
  });
}

void look_at_ticket(void*, TF_OpKernelContext* context) {
  const auto ticket = ticket_of(context, false);
  if (!ticket) return;
  bool settled = false;
  {
    std::unique_lock lock(ticket->mutex);
    settled = ticket->settled.wait_for(lock, kLook, [&] { return ticket->handle != nullptr; });
  }
  Status status;
  set_output(context, 0, TF_BOOL, {}, &settled, sizeof settled, status);
  if (!status.ok()) TF_OpKernelContext_Failure(context, status.get());
}

void take_for_ticket(void*, TF_OpKernelContext* context) {
  const auto ticket = ticket_of(context, true);
  if (!ticket) return;
  std::lock_guard lock(ticket->mutex);
  if (!ticket->handle) {
    fail(context, TF_FAILED_PRECONDITION, "the results of this operation are not there yet");
    return;
  }
  if (const Error* const error = ticket->handle->error()) {
    fail(context, code_of(error->kind), message_of(*error));
    return;
  }
  Status status;
  ticket->work.finish(context, *ticket->handle, status);
  if (!status.ok()) TF_OpKernelContext_Failure(context, status.get());
}

}  // namespace horovodish::tensorflow
