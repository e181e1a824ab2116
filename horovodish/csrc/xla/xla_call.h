// A call of an XLA program in the engine's terms: arguments, attributes and errors, on any device.
#pragma once

#include <cstddef>
#include <cstdint>
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

// The error of an operation that has ended. An error without a message is none, here and below.
Error failure_of(const Handle& handle);
// The runtime's form of an error; null for none.
xla::Error* error_of(const xla::Api& api, const Error& failure);

// The attributes of a call, by name. They throw std::runtime_error if the program does not match the handler.
std::string_view given_text(const xla::CallFrame& frame, std::string_view name);
int64_t given_number(const xla::CallFrame& frame, std::string_view name);

const xla::Buffer& buffer_at(const xla::Buffers& buffers, size_t index);
std::span<std::byte> memory_of(const xla::Buffer& buffer);
std::vector<std::span<std::byte>> memory_of(const xla::Buffers& buffers);
// The members among the arguments of a call that begins an operation: neither the arguments that only order it nor the
// number of the run.
std::vector<std::span<std::byte>> members_of(const xla::CallFrame& frame);

// The lines of a text. The newline after the last one may be missing.
std::vector<std::string_view> lines(std::string_view text);

// One operation, from its `start` until its `done` has taken the result.
struct StartedCall {
  std::string what;  // used in messages, as is the next one
  std::vector<std::string> members;
  std::shared_ptr<Handle> handle;  // null if the operation was not handed to the engine
  std::vector<std::span<std::byte>> results;  // in memory of the call; empty if the engine allocates them
};

// Hands the operation that the attributes and the shapes of the arguments describe to the engine: `submit_it` gives the
// handle. Returns the error if this failed. If this rank cannot take part, the other ranks, which may wait, hear the
// reason. It fails if the program was compiled for other ranks or gradients.
// Arguments: the members of the operation in order; the number of the run, s64[1], may follow. Attributes: kind, op, root,
// process_set (s64), prescale, postscale (f64), codec, name, and members: their names, each ended by a newline. If it is
// part of a tree: tree (its name), leaves and structure (s64), see Family. Of the compilation: rank (s64), ranks (of the
// set, as in RankInGroup), gradients (s64: 1 for Horovod's gradients, 0 for exact ones, -1 for none).
Error start(const xla::CallFrame& frame, StartedCall& call,
            const std::function<std::shared_ptr<Handle>(Engine&, std::shared_ptr<Request>, int process_set,
                                                        const RankInGroup&)>& submit_it);

// For each result of an operation that has not failed: calls copy(wanted, output of the engine or null, result).
Error collect(const StartedCall& call, const std::vector<std::span<std::byte>>& wanted,
              const std::function<void(std::span<std::byte>, Handle::Output*, std::span<std::byte>)>& copy);

// A number that no execution has had, for a runtime that does not tell executions apart.
int64_t new_run();
// The number of the program's execution; 0 if the runtime has none.
int64_t run_id_of(const xla::CallFrame& frame);

// Return the run's number for a call that begins an operation: the last argument if there is one, else XLA's run id, else a new
// number.
int64_t run_of(const xla::CallFrame& frame);

bool speaks_our_interface(const xla::Api& api);
// The frame of every handler: runs `body` unless the runtime asks for something else. An Error that `body` returns, or
// an exception, becomes an error of the program.
xla::Error* handled(xla::CallFrame& frame, const std::function<Error()>& body);

}  // namespace horovodish
