#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensorflow/executions.h"

namespace horovodish::tensorflow {

namespace {

// How long a look keeps a thread of TensorFlow's, which other operations may need.
constexpr std::chrono::milliseconds kLook{1};

// An outcome that outlives the engine's call, with a copy of all that it points to.
struct KeptOutcome {
  explicit KeptOutcome(const c_interface::Outcome& seen) : outcome(seen) {
    if (seen.error_class != nullptr) {
      outcome.error_class = (error_class = seen.error_class).c_str();
      outcome.message = (message = seen.message).c_str();
    }
    for (size_t i = 0; i < seen.output_count; ++i) {
      const c_interface::Output& output = seen.outputs[i];
      const auto* begin = static_cast<const std::byte*>(output.data);
      const auto& bytes = data.emplace_back(begin, begin + output.bytes);
      const auto& counts = rows.emplace_back(output.rows, output.rows + output.ranks);
      outputs.push_back({bytes.data(), bytes.size(), counts.data(), counts.size()});
    }
    outcome.outputs = outputs.data();
  }
  KeptOutcome(const KeptOutcome&) = delete;

  c_interface::Outcome outcome;
  std::string error_class, message;
  std::vector<std::vector<std::byte>> data;
  std::vector<std::vector<int64_t>> rows;
  std::vector<c_interface::Output> outputs;
};

struct Ticket {
  Ticket(const Attributes& attributes, TF_OpKernelContext* context, Status& status)
      : work(attributes, context, Work::Results::held, status) {}

  Work work;
  std::mutex mutex;
  std::condition_variable settled;
  std::optional<KeptOutcome> outcome;  // guarded by mutex
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

void settle_ticket(void* owner, const c_interface::Outcome* outcome) {
  Ticket& ticket = *static_cast<Ticket*>(static_cast<std::shared_ptr<void>*>(owner)->get());
  std::lock_guard lock(ticket.mutex);
  ticket.outcome.emplace(*outcome);
  ticket.settled.notify_all();
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
  const auto ticket = std::make_shared<Ticket>(*static_cast<const Attributes*>(kernel), context, status);
  TensorPtr number;
  if (status.ok()) number.reset(TF_AllocateOutput(context, 0, TF_INT64, nullptr, 0, sizeof(int64_t), status.get()));
  if (!status.ok()) {
    TF_OpKernelContext_Failure(context, status.get());
    return;
  }
  *static_cast<int64_t*>(TF_TensorData(number.get())) = tickets().add(ticket);
  ticket->work.submit(&settle_ticket, ticket);
}

void look_at_ticket(void*, TF_OpKernelContext* context) {
  const auto ticket = ticket_of(context, false);
  if (!ticket) return;
  Status status;
  const TensorPtr done(TF_AllocateOutput(context, 0, TF_BOOL, nullptr, 0, sizeof(bool), status.get()));
  if (!status.ok()) {
    TF_OpKernelContext_Failure(context, status.get());
    return;
  }
  std::unique_lock lock(ticket->mutex);
  *static_cast<bool*>(TF_TensorData(done.get())) =
      ticket->settled.wait_for(lock, kLook, [&] { return ticket->outcome.has_value(); });
}

void take_for_ticket(void*, TF_OpKernelContext* context) {
  const auto ticket = ticket_of(context, true);
  if (!ticket) return;
  std::lock_guard lock(ticket->mutex);
  if (!ticket->outcome) {
    fail(context, TF_FAILED_PRECONDITION, "the results of this operation are not there yet");
    return;
  }
  const c_interface::Outcome& outcome = ticket->outcome->outcome;
  if (outcome.error_class != nullptr) {
    fail(context, code_of(outcome.error_class), message_of(outcome));
    return;
  }
  Status status;
  ticket->work.finish(context, outcome, status);
  if (!status.ok()) TF_OpKernelContext_Failure(context, status.get());
}

}  // namespace horovodish::tensorflow
