// A call of an XLA program, in the engine's terms: arguments, attributes and errors, on whichever device it runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "abi/xla_ffi.h"
#include "engine/engine.h"

namespace horovodish {

namespace xla = abi::xla;

// What an operation that has ended failed with. An error without a message is none, here and below.
Error failure_of(const Handle& handle);
// The runtime's form of an error; null for none.
xla::Error* error_of(const xla::Api& api, const Error& failure);

// The attributes of a call, by name. All of it throws std::runtime_error where the program does not fit to the handler.
class Attributes {
 public:
  explicit Attributes(const xla::CallFrame& frame) : attributes_(frame.attributes) {}

  std::string_view text(std::string_view name) const;
  int64_t number(std::string_view name) const;
  double real(std::string_view name) const;

 private:
  const void* scalar(std::string_view name, xla::DataType type) const;
  const void* value(std::string_view name, xla::AttributeType type) const;

  const xla::Attributes& attributes_;
};

const xla::Buffer& buffer_at(const xla::Buffers& buffers, size_t index);
std::span<std::byte> memory_of(const xla::Buffer& buffer);
std::vector<std::span<std::byte>> memory_of(const xla::Buffers& buffers);
// The arguments of a call that begins an operation: its members, without what it only follows and the number of the run.
std::vector<std::span<std::byte>> members_of(const xla::CallFrame& frame);

// The lines of a text. The newline after the last one may be missing.
std::vector<std::string_view> lines(std::string_view text);

// The operation that the attributes and the shapes of the arguments describe; its members are the arguments in order. After
// them there may be the number of the run, s64[1].
// Attributes: kind, op, root (s64), prescale, postscale (f64), codec, name, and members: their names, each ended by a newline; and
// of the tree that it is a part of, if any: tree, its name, and leaves and structure (s64), see Family.
std::shared_ptr<Request> request_of(const xla::CallFrame& frame);
// One operation, from its `start` until its `done` has taken the result.
struct StartedCall {
  std::string what;  // for messages, as the next one
  std::vector<std::string> members;
  std::shared_ptr<Handle> handle;  // null if the operation was not handed to the engine
  std::vector<std::span<std::byte>> results;  // in memory of the call; none where the engine allocates them
};

// Hands the operation to the engine: `submit_it` gives the handle. Returns why this failed. Where this rank cannot take part, the
// others, which may wait for it, are told why. Attributes: as request_of(), and process_set, rank (s64), ranks: those of the set, as in
// RankInGroup; gradients (s64): 1 where the program has Horovod's, 0 where it has exact ones, -1 where it has none. It fails where
// the program was compiled for other ranks or gradients.
Error start(const xla::CallFrame& frame, StartedCall& call,
            const std::function<std::shared_ptr<Handle>(Engine&, std::shared_ptr<Request>, int process_set,
                                                        const RankInGroup&)>& submit_it);

// Calls copy(wanted, output of the engine, or null, result) for each result of an operation that has not failed.
Error collect(const StartedCall& call, const std::vector<std::span<std::byte>>& wanted,
              const std::function<void(std::span<std::byte>, Handle::Output*, std::span<std::byte>)>& copy);

// A number that no execution has had. For a runtime that does not tell them apart.
int64_t new_run();
// Tells executions of programs apart; 0 where the runtime does not.
int64_t run_id_of(const xla::CallFrame& frame);

// Return the run's number for a call that begins an operation: the last argument if there is one, else XLA's run id, else a new
// number.
int64_t run_of(const xla::CallFrame& frame);

// The runtime asks once, at registration, which version of the interface a handler speaks.
bool answers_metadata(xla::CallFrame& frame);
bool speaks_our_interface(const xla::Api& api);
void check_interface(const xla::CallFrame& frame);
// What every handler does: runs `body` where the runtime asks for nothing else, and makes an error of the program of the
// Error that it gives or of what it throws.
template <class Body>
xla::Error* handled(xla::CallFrame& frame, Body&& body) {
  if (answers_metadata(frame)) return nullptr;
  try {
    check_interface(frame);
    return error_of(*frame.api, body());
  } catch (const std::exception& error) {
    return error_of(*frame.api, {ErrorKind::internal, std::string("horovodish: ") + error.what()});
  }
}

}  // namespace horovodish
