// How native code of a framework's shim hands operations to the engine. It must not wait for them: it is called back.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "engine/engine.h"

namespace horovodish {

// Native code finds the engine between init() and shutdown(), too. The engine that was set last counts.
void set_running_engine(const std::shared_ptr<Engine>& engine);
// Throws EngineStopped before init().
std::shared_ptr<Engine> running_engine();

// How long a framework's thread may drive the engine, so that a small operation ends without a change of threads. The
// time is short: the thread could do other work, and blocked threads of a framework make deadlocks.
inline constexpr std::chrono::milliseconds kDriveLimit{1};

// Hands an operation over and returns at once. `stream`: for an operation on a device (request->device), the
// framework's stream on which the buffers are ready. When `then` is called, the handle's event() orders another stream
// after the result, and the outputs are on the device. After the end of the operation, a completion thread calls
// `then`, if there is one, with the handle. `memory` owns the memory of the buffers: see Operation. `drives`: if
// nothing else is under way, the calling thread drives the engine for kDriveLimit before this returns, and `then` may
// be called meanwhile. Throws as Engine::enqueue() does; `then` is not called in this case.
std::shared_ptr<Handle> submit(Engine& engine, std::shared_ptr<const Request> request, std::vector<Buffer> buffers,
                               int process_set, std::shared_ptr<void> memory, Then then, uintptr_t stream = 0,
                               bool drives = false);

}  // namespace horovodish
