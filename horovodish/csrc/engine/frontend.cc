#include "engine/frontend.h"

#include <mutex>
#include <utility>

#include "gpu/device.h"

namespace horovodish {

namespace {
std::mutex running_mutex;
std::weak_ptr<Engine> running;
}  // namespace

void set_running_engine(const std::shared_ptr<Engine>& engine) {
  std::lock_guard lock(running_mutex);
  running = engine;
}

std::shared_ptr<Engine> running_engine() {
  std::lock_guard lock(running_mutex);
  if (auto engine = running.lock()) return engine;
  throw EngineStopped("horovodish is not initialized in this process. Remedy: call init() first.");
}

std::shared_ptr<Handle> submit(Engine& engine, std::shared_ptr<const Request> request, std::vector<Buffer> buffers,
                               int process_set, std::shared_ptr<void> memory, Then then, uintptr_t stream,
                               bool drives) {
  auto operation = operation_of(std::move(request), std::move(buffers), process_set, engine.make_handle());
  operation->memory = std::move(memory);
  operation->then = std::move(then);
  operation->in_program = true;
  if (!operation->request->on_host()) {
    operation->ready.push_back(Device::get(operation->request->device).record(stream));
  }
  const auto handle = operation->handle;
  if (drives) {
    engine.enqueue_and_drive(operation, kDriveLimit);
  } else {
    engine.enqueue(std::move(operation), false);
  }
  return handle;
}

}  // namespace horovodish
