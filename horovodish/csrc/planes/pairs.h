// Sends and receives of a process set. They pass between two ranks, without the negotiation and the other ranks.
//
// Everything from one rank to another travels in one order through their channel: a *frame* that describes a *message*,
// then the bytes of the message. A small message and its frame are written in one piece. A message goes straight into
// the tensor of the first receive that names its sender and its tag. A small message is sent before there is such a
// receive, because the channel holds it. A larger message waits for its receive, and later messages wait behind it. If
// its receiver waits for another message of this sender, that message may be behind it. So the receiver *keeps* the
// larger message in memory until its receive comes:
//
//     rank 0 sends a with tag 1, b with tag 2        rank 1 receives with tag 2, and keeps a; then with tag 1
//
// If a message does not fit its receive, the receiver refuses it: the receive fails, and the sender gets a frame with
// the reason. The bytes of the message still travel, but are dropped, so later messages are intact. If the send has
// ended by then, the sender prints a warning.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory/arena.h"
#include "memory/clock.h"
#include "negotiation/links/channel.h"
#include "negotiation/process_set_config.h"
#include "operation/operation.h"
#include "planes/plane.h"

namespace horovodish {

class Pairs {
 public:
  using Pointer = std::shared_ptr<Operation>;

  // `segment_bytes`: of a message between hosts. `arena` may be null if this rank is alone on its host. `arena` and
  // `config` outlive this object.
  Pairs(const ProcessSetConfig& config, size_t segment_bytes, Arena* arena, OnEnd on_end);
  ~Pairs();

  void submit(const Pointer& operation);
  // Moves everything that can be moved at once. Returns true if anything has moved. Throws if a rank cannot be reached.
  bool advance();
  bool busy() const { return under_way_ > 0; }
  // Takes back an operation that has not begun to move. Returns true if it did.
  bool cancel(const Handle& handle);
  // A rank is lost. Data that was sent to this rank can be received until `until`. After that, every operation fails
  // with `why`, which must outlive this object.
  void end(const Error& why, Clock::time_point until) noexcept;
  // Fails every operation under way. Needs no memory.
  void abandon(const Error& why) noexcept;

  // Names the operation that has not moved for longest, and how many more have not moved for `limit`; empty if there
  // are none. `only_new`: leaves out operations that it has named or counted before.
  std::string waiting(Clock::time_point now, Clock::duration limit, bool only_new);

 private:
  struct Frame {
    uint64_t bytes = 0;  // bytes that follow the frame
    uint64_t number = 0;  // of the message, from 0; in a refusal: of the refused message
    uint32_t tag = 0;
    DType dtype = DType::uint8;
    bool refuses = false;  // the bytes that follow are the reason of a refusal
    char name[42] = {};
  };
  struct Entry {
    Pointer operation = nullptr;
    Clock::time_point since = {};
    bool reported = false;
  };
  struct Send {
    Frame frame = {};
    Entry entry = {};  // without an operation: a refusal
    std::string reason = {};  // of a refusal
    std::vector<std::byte> packed = {};  // a small message behind its frame
    std::optional<Error> refused = {};
    size_t moved = 0;  // bytes of the frame and the message
  };
  struct Kept {
    Frame frame;
    std::unique_ptr<std::byte[]> data;
  };
  struct Peer {
    int index;
    std::unique_ptr<Channel> channel;
    Clock::time_point last_moved = {};
    std::list<Send> sends = {};  // the first one may have begun to move
    uint64_t sent = 0;  // messages
    // The message that arrives now. Once `target` is set, the bytes go into the tensor of `receive`, or into `data`.
    Frame frame = {};
    size_t moved = 0;  // bytes of the frame and the message
    std::byte* target = nullptr;
    Entry receive = {};
    std::unique_ptr<std::byte[]> data = {};
    bool drops = false;  // the message was refused
    std::list<Kept> kept = {};
    // Bytes that came with a frame and are not used yet.
    std::unique_ptr<std::byte[]> ahead = {};
    size_t ahead_begin = 0, ahead_end = 0;
  };
  using Receives = std::list<Entry>;

  Peer* open(int index);
  bool advance_peers();
  static const std::byte* bytes_to_send(const Send& send);
  void pack(Send& send) const;
  bool send_to(Peer& peer);
  size_t read_frame(Peer& peer, std::byte* to, size_t size);
  size_t read_message(Peer& peer, std::byte* to, size_t size);
  size_t take_ahead(Peer& peer, std::byte* to, size_t size);
  bool receive_from(Peer& peer);
  bool find_place(Peer& peer);
  void arrived(Peer& peer);
  Receives::iterator receive_for(const Peer& peer, uint32_t tag);
  bool takes_from(const Operation& receive, const Peer& peer) const;
  bool take_kept(const Pointer& receive);
  void hand_over(Peer& peer, const Kept& kept, const Pointer& receive);
  bool refuse_misfit(Peer& peer, const Frame& frame, const Pointer& receive);
  void was_refused(Peer& peer, uint64_t number, const std::string& why);
  void end_operation(const Pointer& operation, const Error* error) noexcept;
  WorldRank rank_of(const Peer& peer) const { return config_.world_rank(peer.index); }

  const ProcessSetConfig& config_;
  const size_t segment_bytes_, packed_bytes_;
  Arena* const arena_;
  const OnEnd on_end_;
  std::map<int, std::unique_ptr<Peer>> peers_;  // by index, from their first operation on; null: given up
  Receives receives_;  // receives without a message so far, in the order of their submission
  size_t under_way_ = 0;
  const Error* why_ = nullptr;  // once a rank is lost
  Clock::time_point until_{};
};

}  // namespace horovodish
