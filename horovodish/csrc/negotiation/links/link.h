// An edge of the negotiation tree: whole messages both ways between two ranks, in order, without ever blocking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "negotiation/loss.h"

namespace horovodish {

class Link {
 public:
  virtual ~Link() = default;

  void send(std::string_view message) { append(message, 0); }
  // The last message of this rank: it leaves the job.
  void send_farewell(const Lost& lost) {
    Writer writer;
    writer.write(lost);
    append(writer.take(), kFarewell);
    leaves_ = true;
  }

  // Moves what can be moved at once; true when a byte was. A link that breaks counts as a failed peer's farewell.
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
  // The next whole message, if there is one.
  std::optional<std::string> receive() {
    const size_t ready = incoming_.size() - consumed_;
    uint32_t word;
    if (ready < sizeof word) return std::nullopt;
    std::memcpy(&word, incoming_.data() + consumed_, sizeof word);
    const size_t length = word & kLengthMask;
    if (ready < sizeof word + length) return std::nullopt;
    std::string message = incoming_.substr(consumed_ + sizeof word, length);
    consumed_ += sizeof word + length;
    // Also where the next message has begun to arrive: there may always be such a one.
    if (consumed_ == incoming_.size() || consumed_ > kMostConsumed) {
      incoming_.erase(0, consumed_);
      consumed_ = 0;
    }
    if ((word & kFarewell) == 0) return message;
    farewell_ = Reader(message).read<Lost>();
    return std::nullopt;
  }
  // How and why the peer has left, once it has said farewell.
  const std::optional<Lost>& farewell() const { return farewell_; }
  // Wakes the peer's engine even if it has nothing under way.
  virtual void nudge() {}
  bool all_sent() { return outgoing_.empty() && flushed(); }
  // Whether something waits for room on the way to the peer.
  bool has_unsent() const { return !outgoing_.empty(); }

 protected:
  bool leaves() const { return leaves_; }
  // Move up to `size` bytes and return how many it were; 0 when nothing can be moved now.
  virtual size_t write_some(const char* data, size_t size) = 0;
  virtual size_t read_some(char* data, size_t size) = 0;
  virtual bool flushed() = 0;

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
    size_t sent = 0;
    while (sent < outgoing_.size()) {
      const size_t step = write_some(outgoing_.data() + sent, outgoing_.size() - sent);
      if (step == 0) break;
      sent += step;
    }
    outgoing_.erase(0, sent);
    return sent > 0;
  }
  bool pull_incoming() {
    char block[4096];
    bool any = false;
    while (const size_t step = read_some(block, sizeof block)) {
      incoming_.append(block, step);
      any = true;
    }
    return any;
  }

  std::string outgoing_, incoming_;
  size_t consumed_ = 0;
  std::optional<Lost> farewell_;
  bool leaves_ = false;  // this rank has said farewell
};

}  // namespace horovodish
