// How native code of a framework's shim hands operations to the engine. It must not wait for them: it is called back.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "engine/engine.h"

namespace horovodish {

// The engine between init() and shutdown() is known to native code as well. The last one that was set counts.
void set_running_engine(const std::shared_ptr<Engine>& engine);
// Throws EngineStopped before init().
std::shared_ptr<Engine> running_engine();

// How long a framework's thread may drive the engine, so that a small operation ends without a change of threads. No longer:
// it could go on with other work, and blocked threads of a framework make deadlocks.
inline constexpr std::chrono::milliseconds kDriveLimit{1};

// Hands an operation over and returns at once. `stream`: of a framework, on which the buffers of an operation on a device
// (request->device) are ready; when `then` is called, the handle's event() orders another stream after the result, and
// its outputs are on the device. When it has ended `then`, if there is one, is called with its handle, on a completion thread.
// `memory` owns the memory of the buffers: see Operation.
// Throws as Engine::enqueue() does; `then` is not called in this case.
// `drives`: when nothing else is under way, the calling thread drives the engine for kDriveLimit before this returns; `then`
// may be called meanwhile.
std::shared_ptr<Handle> submit(Engine& engine, std::shared_ptr<const Request> request, std::vector<Buffer> buffers,
                               int process_set, std::shared_ptr<void> memory, Then then, uintptr_t stream = 0,
                               bool drives = false);

}  // namespace horovodish
