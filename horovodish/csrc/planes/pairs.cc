#include "planes/pairs.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "arithmetic/copy_bytes.h"
#include "negotiation/links/mpi_channel.h"
#include "operation/warning.h"

namespace horovodish {

namespace {

// How many steps one channel takes before the others have their turn.
constexpr int kSteps = 16;
// The most bytes of a frame with its message in one piece. Between hosts, MPI needs about 10 us for another piece.
constexpr size_t kPackedBytes = 4096;

const Error kGivenUp{ErrorKind::rank_lost, "this rank has left the process set"};

uint64_t bytes_of(const Request& request) { return row_bytes(request.members.at(0)); }

std::string content_text(DType dtype, uint64_t bytes, const std::string& name) {
  const uint64_t count = bytes / horovodish::bytes_of(dtype);
  const std::string elements = std::to_string(count) + (count == 1 ? " element of " : " elements of ");
  return elements + std::string(name_of(dtype)) + (is_unnamed(name) ? "" : " as '" + name + "'");
}

// The number of leading bytes, at most `most`, that are whole characters.
size_t whole_characters(const std::string& text, size_t most) {
  size_t count = std::min(text.size(), most);
  while (count < text.size() && (text[count] & 0xC0) == 0x80) --count;
  return count;
}

// Why this rank cannot carry out the operation, whatever the other rank does; empty if it can.
std::string problem_of(const Request& request, const ProcessSetConfig& config) {
  if (!request.on_host())
    return "a send or a receive takes host memory only. Remedy: copy the CUDA tensor to the host.";
  if (request.kind == Kind::receive && request.root == Request::kAnyRank) return {};
  const bool is_own = request.root == config.own_rank();
  const bool is_known = std::find(config.ranks.begin(), config.ranks.end(), request.root) != config.ranks.end();
  if (is_known && !is_own) return {};
  return text_of(request.root) + (is_own ? " is this rank itself" : " is not in the process set") +
         ". Remedy: name another rank of the set.";
}

}  // namespace

Pairs::Pairs(const ProcessSetConfig& config, size_t segment_bytes, Arena* arena, OnEnd on_end)
    : config_(config),
      segment_bytes_(segment_bytes),
      packed_bytes_(std::min(kPackedBytes, segment_bytes)),
      arena_(arena),
      on_end_(std::move(on_end)) {}

Pairs::~Pairs() {
  for (auto& [index, peer] : peers_) {
    if (peer && !peer->channel->cancel()) static_cast<void>(peer.release());
  }
}

void Pairs::submit(const Pointer& operation) {
  const Request& request = *operation->request;
  ++under_way_;
  if (const std::string problem = problem_of(request, config_); !problem.empty()) {
    const Error error{ErrorKind::internal, problem};
    return end_operation(operation, &error);
  }
  const Entry entry{operation, Clock::now()};
  if (request.kind == Kind::receive) {
    for (int index = 0; index < static_cast<int>(config_.ranks.size()); ++index) {
      const bool is_sender = request.root == config_.world_rank(index);
      if (is_sender || (request.root == Request::kAnyRank && index != config_.own)) open(index);
    }
    if (take_kept(operation)) return;
    receives_.push_back(entry);
  } else {
    const auto to = std::find(config_.ranks.begin(), config_.ranks.end(), request.root) - config_.ranks.begin();
    Peer* const peer = why_ == nullptr ? open(static_cast<int>(to)) : nullptr;
    if (peer == nullptr) return end_operation(operation, why_ != nullptr ? why_ : &kGivenUp);
    Send& send = peer->sends.emplace_back();
    send.entry = entry;
    send.frame.bytes = bytes_of(request);
    send.frame.number = peer->sent++;
    send.frame.tag = request.tag;
    send.frame.dtype = request.members[0].dtype;
    request.name.copy(send.frame.name, whole_characters(request.name, sizeof send.frame.name - 1));
    pack(send);
  }
  if (why_ != nullptr) end(*why_, until_);
}

bool Pairs::advance() {
  if (why_ != nullptr && busy() && Clock::now() >= until_) abandon(*why_);
  return advance_peers();
}

bool Pairs::advance_peers() {
  bool moved = false;
  for (auto& [index, peer] : peers_) {
    if (!peer) continue;
    const bool received = receive_from(*peer), sent = send_to(*peer);
    if (!received && !sent) continue;
    peer->last_moved = Clock::now();
    moved = true;
  }
  return moved;
}

bool Pairs::cancel(const Handle& handle) {
  const auto is_its = [&](const Entry& entry) { return entry.operation && entry.operation->handle.get() == &handle; };
  Pointer found;
  const auto receive = std::find_if(receives_.begin(), receives_.end(), is_its);
  if (receive != receives_.end()) {
    found = receive->operation;
    receives_.erase(receive);
  }
  for (auto& [index, peer] : peers_) {
    if (!peer || peer->sends.empty()) continue;
    auto& sends = peer->sends;  // the first one may be with MPI
    const auto send = std::find_if(std::next(sends.begin()), sends.end(), [&](auto& its) { return is_its(its.entry); });
    if (send == sends.end()) continue;
    found = send->entry.operation;
    sends.erase(send);
  }
  if (!found) return false;
  const Error error{ErrorKind::internal, "it was cancelled"};
  end_operation(found, &error);
  return true;
}

void Pairs::end(const Error& why, Clock::time_point until) noexcept {
  why_ = &why;
  until_ = until;
  try {
    while (advance_peers()) {
    }
  } catch (const std::exception&) {  // the rank is lost
  }
  if (Clock::now() >= until_) abandon(why);
}

void Pairs::abandon(const Error& why) noexcept {
  for (auto& [index, peer] : peers_) {
    if (!peer) continue;
    const bool stopped = peer->channel->cancel();
    for (const Send& send : peer->sends) {
      if (!send.entry.operation) continue;
      if (!stopped && &send == &peer->sends.front()) keep_for_ever(send.entry.operation->memory);
      end_operation(send.entry.operation, &why);
    }
    const Pointer receive = std::exchange(peer->receive.operation, nullptr);
    if (receive) {
      if (!stopped) keep_for_ever(receive->memory);
      end_operation(receive, &why);
    }
    // The channel is not used again: cancelling may have ended a receive, and nobody reads what that receive has got.
    if (!stopped) static_cast<void>(peer.release());
    peer.reset();
  }
  for (const Entry& entry : std::exchange(receives_, {})) end_operation(entry.operation, &why);
}

std::string Pairs::waiting(Clock::time_point now, Clock::duration limit, bool only_new) {
  const Request* longest = nullptr;
  Clock::duration time{};
  size_t count = 0;
  const auto look = [&](Entry& entry, Clock::time_point since) {
    if (!entry.operation || now - since < limit || (only_new && std::exchange(entry.reported, true))) return;
    ++count;
    if (longest != nullptr && now - since <= time) return;
    longest = entry.operation->request.get();
    time = now - since;
  };
  for (Entry& receive : receives_) look(receive, receive.since);
  for (auto& [index, peer] : peers_) {
    if (!peer) continue;
    look(peer->receive, peer->last_moved);
    for (Send& send : peer->sends) look(send.entry, std::max(send.entry.since, peer->last_moved));
  }
  if (count == 0) return {};
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time).count();
  return transfer_text(*longest) + (count > 1 ? " and " + std::to_string(count - 1) + " more" : "") + ", for " +
         std::to_string(seconds) + " s";
}

// Null if a transfer between the two that had begun to move was given up.
Pairs::Peer* Pairs::open(int index) {
  const auto found = peers_.find(index);
  if (found != peers_.end()) return found->second.get();
  std::unique_ptr<Channel> channel;
  if (const auto local = config_.local_rank(index)) {
    channel = std::make_unique<SharedMemoryChannel<TransferRing>>(
        arena_->transfer_ring(config_.region, arena_->own(), *local),
        arena_->transfer_ring(config_.region, *local, arena_->own()), arena_->doorbell(*local),
        config_.sent->within_host);
  } else {
    channel = std::make_unique<MpiChannel>(*config_.mpi, index, config_.mpi->tags.transfers(), segment_bytes_);
  }
  auto& peer = peers_[index] = std::make_unique<Peer>(Peer{.index = index, .channel = std::move(channel)});
  peer->ahead = std::make_unique_for_overwrite<std::byte[]>(packed_bytes_);
  return peer.get();
}

const std::byte* Pairs::bytes_to_send(const Send& send) {
  const Pointer& operation = send.entry.operation;
  return operation ? operation->buffers[0].source : reinterpret_cast<const std::byte*>(send.reason.data());
}

void Pairs::pack(Send& send) const {
  const size_t whole = sizeof(Frame) + send.frame.bytes;
  if (whole > packed_bytes_) return;
  send.packed.resize(whole);
  std::memcpy(send.packed.data(), &send.frame, sizeof(Frame));
  if (send.frame.bytes > 0) std::memcpy(send.packed.data() + sizeof(Frame), bytes_to_send(send), send.frame.bytes);
}

bool Pairs::send_to(Peer& peer) {
  bool moved = false;
  for (int step = 0; step < kSteps && !peer.sends.empty(); ++step) {
    Send& send = peer.sends.front();
    const Pointer& operation = send.entry.operation;
    const size_t whole = sizeof(Frame) + send.frame.bytes;
    if (send.moved < whole) {
      const bool is_packed = !send.packed.empty(), in_frame = is_packed || send.moved < sizeof(Frame);
      const auto* from = is_packed  ? send.packed.data()
                         : in_frame ? reinterpret_cast<const std::byte*>(&send.frame)
                                    : bytes_to_send(send);
      const size_t begin = in_frame ? 0 : sizeof(Frame), end = in_frame && !is_packed ? sizeof(Frame) : whole;
      const size_t count = peer.channel->write(from + (send.moved - begin), end - send.moved);
      if (count == 0) break;
      moved = true;
      send.moved += count;
      if (send.moved < whole) continue;
    }
    // A receiver that refuses a message says so before it takes the rest, so a refusal has arrived by now.
    moved |= receive_from(peer);
    if (peer.moved >= sizeof(Frame) && peer.frame.refuses) break;  // but for its end
    if (operation) end_operation(operation, send.refused ? &*send.refused : nullptr);
    peer.sends.pop_front();
  }
  return moved;
}

bool Pairs::receive_from(Peer& peer) {
  bool moved = false;
  for (int step = 0; step < kSteps; ++step) {
    if (peer.moved < sizeof(Frame)) {
      auto* const frame = reinterpret_cast<std::byte*>(&peer.frame);
      const size_t count = read_frame(peer, frame + peer.moved, sizeof(Frame) - peer.moved);
      if (count == 0) break;
      moved = true;
      peer.moved += count;
      if (peer.moved < sizeof(Frame)) continue;
    }
    if (peer.target == nullptr) {
      if (!find_place(peer)) break;
      if (peer.drops) return true;  // the refusal is sent before the rest of the message is read
    }
    const size_t whole = sizeof(Frame) + peer.frame.bytes;
    if (peer.moved < whole) {
      const size_t count = read_message(peer, peer.target + (peer.moved - sizeof(Frame)), whole - peer.moved);
      if (count == 0) break;
      moved = true;
      peer.moved += count;
    }
    if (peer.moved == whole) arrived(peer);
  }
  return moved;
}

// The sender may have packed the message behind its frame.
size_t Pairs::read_frame(Peer& peer, std::byte* to, size_t size) {
  if (peer.ahead_begin == peer.ahead_end) {
    peer.ahead_begin = 0;
    peer.ahead_end = peer.channel->read(peer.ahead.get(), packed_bytes_);
  }
  return take_ahead(peer, to, size);
}

size_t Pairs::read_message(Peer& peer, std::byte* to, size_t size) {
  return peer.ahead_begin < peer.ahead_end ? take_ahead(peer, to, size) : peer.channel->read(to, size);
}

size_t Pairs::take_ahead(Peer& peer, std::byte* to, size_t size) {
  const size_t count = std::min(size, peer.ahead_end - peer.ahead_begin);
  if (count > 0) std::memcpy(to, peer.ahead.get() + peer.ahead_begin, count);
  peer.ahead_begin += count;
  return count;
}

// Finds the target of the message whose frame has arrived. Returns false if no operation waits for it or for a message
// behind it.
bool Pairs::find_place(Peer& peer) {
  const Frame& frame = peer.frame;
  if (static_cast<size_t>(frame.dtype) >= kDTypeNames.size() || frame.name[sizeof frame.name - 1] != 0) {
    throw std::runtime_error("internal error: the bytes from " + text_of(rank_of(peer)) + " are not a message");
  }
  if (!frame.refuses) {
    const auto found = receive_for(peer, frame.tag);
    const auto takes = [&](const Entry& receive) { return takes_from(*receive.operation, peer); };
    if (found == receives_.end() && std::none_of(receives_.begin(), receives_.end(), takes)) return false;
    if (found != receives_.end()) {
      const Entry receive = *found;
      receives_.erase(found);
      peer.drops = refuse_misfit(peer, frame, receive.operation);
      if (!peer.drops) {
        peer.receive = receive;
        peer.target = receive.operation->buffers[0].target;
        if (peer.target != nullptr) return true;
      }
    }
  }
  peer.data = std::make_unique_for_overwrite<std::byte[]>(std::max<size_t>(frame.bytes, 1));
  peer.target = peer.data.get();
  return true;
}

void Pairs::arrived(Peer& peer) {
  const Frame frame = peer.frame;
  const Pointer receive = std::exchange(peer.receive, {}).operation;
  Kept kept{frame, std::exchange(peer.data, nullptr)};
  const bool drops = std::exchange(peer.drops, false);
  peer.target = nullptr;
  peer.moved = 0;
  if (frame.refuses) {
    was_refused(peer, frame.number, {reinterpret_cast<const char*>(kept.data.get()), frame.bytes});
  } else if (receive) {
    receive->handle->sender = number_of(rank_of(peer));
    end_operation(receive, nullptr);
  } else if (!drops) {
    const auto found = receive_for(peer, frame.tag);
    if (found == receives_.end()) return peer.kept.push_back(std::move(kept));
    const Pointer late = found->operation;
    receives_.erase(found);
    hand_over(peer, kept, late);
  }
}

// The first receive that takes a message of this tag from this peer.
Pairs::Receives::iterator Pairs::receive_for(const Peer& peer, uint32_t tag) {
  return std::find_if(receives_.begin(), receives_.end(), [&](const Entry& receive) {
    return receive.operation->request->tag == tag && takes_from(*receive.operation, peer);
  });
}

bool Pairs::takes_from(const Operation& receive, const Peer& peer) const {
  const WorldRank from = receive.request->root;
  return from == rank_of(peer) || from == Request::kAnyRank;
}

bool Pairs::take_kept(const Pointer& receive) {
  for (auto& [index, peer] : peers_) {
    if (!peer || !takes_from(*receive, *peer)) continue;
    const auto found = std::find_if(peer->kept.begin(), peer->kept.end(),
                                    [&](const Kept& kept) { return kept.frame.tag == receive->request->tag; });
    if (found == peer->kept.end()) continue;
    const Kept kept = std::move(*found);
    peer->kept.erase(found);
    hand_over(*peer, kept, receive);
    return true;
  }
  return false;
}

void Pairs::hand_over(Peer& peer, const Kept& kept, const Pointer& receive) {
  if (refuse_misfit(peer, kept.frame, receive)) return;
  if (kept.frame.bytes > 0) copy_bytes(receive->buffers[0].target, kept.data.get(), kept.frame.bytes);
  receive->handle->sender = number_of(rank_of(peer));
  end_operation(receive, nullptr);
}

// Returns true if the message does not fit the receive, which has then failed.
bool Pairs::refuse_misfit(Peer& peer, const Frame& frame, const Pointer& receive) {
  const Request& request = *receive->request;
  const DType dtype = request.members[0].dtype;
  if (frame.dtype == dtype && frame.bytes == bytes_of(request)) return false;
  const Error error{ErrorKind::mismatch,
                    text_of(rank_of(peer)) + " sends " + content_text(frame.dtype, frame.bytes, frame.name) + ", " +
                        text_of(config_.own_rank()) + " receives " +
                        content_text(dtype, bytes_of(request), request.name) + ", with tag " +
                        std::to_string(frame.tag) +
                        ". Remedy: give both a tensor of the same dtype and number of elements, or different tags."};
  // Sent as early as possible: this rank's messages to the peer may wait for a receive.
  Send& refusal = *peer.sends.emplace(peer.sends.empty() ? peer.sends.end() : std::next(peer.sends.begin()));
  refusal.reason = error.message;
  refusal.frame.bytes = refusal.reason.size();
  refusal.frame.number = frame.number;
  refusal.frame.refuses = true;
  pack(refusal);
  end_operation(receive, &error);
  return true;
}

void Pairs::was_refused(Peer& peer, uint64_t number, const std::string& why) {
  for (Send& send : peer.sends) {
    if (!send.entry.operation || send.frame.number != number) continue;
    send.refused = {ErrorKind::mismatch, why};
    return;
  }
  warn("a message from " + text_of(config_.own_rank()) + " was refused: " + why);
}

void Pairs::end_operation(const Pointer& operation, const Error* error) noexcept {
  --under_way_;
  on_end_(operation, error);
}

}  // namespace horovodish
