// The answer of a rank to `horovodish status`.
#include <new>

#include "engine/engine.h"

namespace horovodish {

namespace {

// How long `horovodish status` waits for the driving thread. That thread looks all the time, unless it is stuck in a
// foreign call.
constexpr std::chrono::milliseconds kStatusLimit{300};

}  // namespace

void Engine::show_status(std::shared_ptr<std::byte> page, int listener, int stacks, int stack_signal,
                         HoldPython hold_python) {
  {
    const std::lock_guard hold(seat_);
    const auto status_page = new (page.get()) StatusPage();
    page_ = std::shared_ptr<StatusPage>(std::move(page), status_page);
  }
  status_door_ =
      std::make_unique<StatusDoor>(listener, stacks, stack_signal, std::move(hold_python), [this] { return status(); });
}

// The driving thread answers between two looks. If no thread drives, this one takes the seat. Empty: neither was
// possible in time.
std::string Engine::status() {
  std::shared_ptr<Doorbell> doorbell;
  {
    std::lock_guard lock(inbox_mutex_);
    doorbell = doorbell_;
  }
  status_wanted_ = true;
  doorbell->ring_own();
  if (seat_.take_as_caller(Clock::now() + kStatusLimit, [&] { return !status_wanted_; })) {
    if (status_wanted_) write_status();
    seat_.unlock();
  }
  status_wanted_ = false;
  std::lock_guard lock(status_mutex_);
  return std::exchange(status_, {});
}

// The caller holds the seat.
void Engine::write_status() noexcept {
  try {
    const Clock::time_point now = Clock::now();
    std::string text = "engine\n";
    for (const auto& [id, set] : process_sets_) text += set->describe_waits(now);
    const auto global = process_sets_.find(0);
    if (global != process_sets_.end()) {
      for (const auto& [rank, its] : global->second->lateness()) {
        text += "late\t" + std::to_string(number_of(rank)) + "\t" + std::to_string(its.total_seconds) + "\n";
      }
      text += global->second->describe_sent();
    }
    std::lock_guard lock(status_mutex_);
    for (const auto& [who, line] : described_waits_) text += line + "\n";
    status_ = std::move(text);
  } catch (const std::bad_alloc&) {  // the asker gets no answer
  }
  status_wanted_ = false;
  seat_.announce_change();
}

void Engine::describe_wait(const std::string& who, const std::string& line) {
  std::lock_guard lock(status_mutex_);
  if (line.empty()) {
    described_waits_.erase(who);
  } else {
    described_waits_[who] = line;
  }
}

void Engine::stated(const Operation& operation, Clock::time_point now) noexcept {
  const Request& request = *operation.request;
  const std::string_view tensor = tensor_for(request);
  page_->submit(name_of(request.kind), tensor.empty() ? request.name : tensor, now);
}

}  // namespace horovodish
