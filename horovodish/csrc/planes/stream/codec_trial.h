// Chooses the codec of Compression.auto: the ranks reduce meaningless values between hosts in turns, without a codec
// and as int8, and take int8 if it is worth it. The trial does not touch the training.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "memory/clock.h"
#include "operation/operation.h"

namespace horovodish {

class CodecTrial {
 public:
  explicit CodecTrial(const std::vector<std::vector<int>>& hosts);

  // The operation that all ranks carry out next, after the end of the one before; null once they have chosen.
  std::shared_ptr<Operation> next();
  CodecKind chosen() const;
  // Tells the user which codec was chosen and how to repeat the run. `asked`: the compression that he passed.
  void say(const Compression& asked) const;
  static void say_one_host();

 private:
  static constexpr std::array kCandidates{CodecKind::none, CodecKind::int8};

  const size_t hosts_;
  size_t ranks_ = 0;
  std::shared_ptr<std::vector<float>> values_;
  std::array<std::vector<double>, kCandidates.size()> seconds_;  // of this rank, by candidate
  std::shared_ptr<std::array<double, kCandidates.size()>> medians_;  // of this rank, then the sums over all
  const std::shared_ptr<CodeFigures> figures_ = std::make_shared<CodeFigures>();  // nobody reads them
  size_t begun_ = 0;  // operations
  Clock::time_point since_;
};

}  // namespace horovodish
