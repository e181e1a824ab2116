// An edge of the negotiation tree: whole messages both ways between two ranks, in order, without ever blocking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "negotiation/links/channel.h"
#include "negotiation/loss.h"

namespace horovodish {

class Link {
 public:
  // The most bytes of a message between hosts.
  static constexpr size_t kBlockBytes = 32 << 10;

  explicit Link(std::unique_ptr<Channel> channel) : channel_(std::move(channel)) {}
  // A farewell must reach its peer even if the peer has not taken it yet.
  ~Link() {
    if (channel_->cancel()) return;
    static_cast<void>(channel_.release());
    static_cast<void>(in_.release());
    static_cast<void>(sending_.release());
  }

  void send(std::string_view message) { append(message, 0); }
  // Sends the last message of this rank, which leaves the job.
  void send_farewell(const Lost& lost) {
    Writer writer;
    writer.write(lost);
    append(writer.take(), kFarewell);
    leaves_ = true;
  }

  // Moves all bytes that can be moved at once. Returns true if it moved any. A broken link counts as the farewell of a
  // failed peer.
  bool advance() {
    try {
      const bool sent = push_outgoing();
      const bool received = pull_incoming();
      return sent || received;
    } catch (const std::exception& error) {
      if (!farewell_) farewell_ = {.loss = Loss::failed, .text = error.what()};
      return false;
    }
  }
  // The next whole message; none if it has not arrived.
  std::optional<std::string> receive() {
    const size_t ready = incoming_.size() - consumed_;
    uint32_t word;
    if (ready < sizeof word) return std::nullopt;
    std::memcpy(&word, incoming_.data() + consumed_, sizeof word);
    const size_t length = word & kLengthMask;
    if (ready < sizeof word + length) return std::nullopt;
    std::string message = incoming_.substr(consumed_ + sizeof word, length);
    consumed_ += sizeof word + length;
    // Also when the next message has begun to arrive, since a part of one may always be there.
    if (consumed_ == incoming_.size() || consumed_ > kMostConsumed) {
      incoming_.erase(0, consumed_);
      consumed_ = 0;
    }
    if ((word & kFarewell) == 0) return message;
    farewell_ = Reader(message).read<Lost>();
    return std::nullopt;
  }
  // How and why the peer has left; set once it has said farewell.
  const std::optional<Lost>& farewell() const { return farewell_; }
  // Wakes the peer's engine even if it has nothing under way.
  void nudge() { channel_->nudge(); }
  // Returns whether bytes are still on the way to the peer.
  bool has_unsent() const { return sent_ < sending_->size() || !outgoing_.empty(); }

 private:
  static constexpr uint32_t kFarewell = 1u << 31, kLengthMask = kFarewell - 1;
  static constexpr size_t kMostConsumed = 64 << 10;

  void append(std::string_view message, uint32_t flags) {
    const uint32_t word = static_cast<uint32_t>(message.size()) | flags;
    std::string whole(reinterpret_cast<const char*>(&word), sizeof word);
    whole += message;
    outgoing_ += whole;  // as a whole or, without memory, not at all
  }
  bool push_outgoing() {
    for (bool any = false;; any = true) {
      if (sent_ == sending_->size()) {
        sending_->swap(outgoing_);
        outgoing_.clear();
        sent_ = 0;
      }
      if (sending_->empty()) return any;
      const auto* const bytes = reinterpret_cast<const std::byte*>(sending_->data());
      const size_t step = channel_->write(bytes + sent_, sending_->size() - sent_, leaves_);
      if (step == 0) return any;
      sent_ += step;
    }
  }
  bool pull_incoming() {
    bool any = false;
    while (const size_t step = channel_->read(in_.get(), kBlockBytes)) {
      incoming_.append(reinterpret_cast<const char*>(in_.get()), step);
      any = true;
    }
    return any;
  }

  std::unique_ptr<Channel> channel_;
  // The channel owns these two while a transfer is under way.
  std::unique_ptr<std::byte[]> in_ = std::make_unique_for_overwrite<std::byte[]>(kBlockBytes);
  std::unique_ptr<std::string> sending_ = std::make_unique<std::string>();
  size_t sent_ = 0;  // bytes of it
  std::string outgoing_, incoming_;
  size_t consumed_ = 0;
  std::optional<Lost> farewell_;
  bool leaves_ = false;  // this rank has said farewell
};

}  // namespace horovodish
