#include "xla/xla_handlers.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arithmetic/copy_bytes.h"
#include "engine/executions.h"
#include "engine/frontend.h"
#include "xla/xla_call.h"

namespace horovodish {

xla::Error* xla_compare(xla::CallFrame* frame) {
  return handled(*frame, [&]() -> Error {
    const std::span<std::byte> given = memory_of(buffer_at(frame->arguments, 0));
    const std::span<std::byte> passed_on = memory_of(buffer_at(frame->results, 0));
    if (passed_on.data() != given.data()) copy_bytes(passed_on.data(), given.data(), given.size());
    try {
      running_engine()->begin_step();
    } catch (const EngineStopped&) {  // the reduction says so
    }
    count_execution(std::string(given_text(*frame, "key")), 1, given_text(*frame, "parameters"), [&] {
      std::vector<uintptr_t> addresses;
      for (size_t i = 1; i < static_cast<size_t>(frame->arguments.size); ++i) {
        addresses.push_back(reinterpret_cast<uintptr_t>(buffer_at(frame->arguments, i).data));
      }
      return addresses;
    });
    return {};
  });
}

}  // namespace horovodish
