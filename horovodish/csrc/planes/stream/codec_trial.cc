#include "planes/stream/codec_trial.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

namespace horovodish {

namespace {

// Several pieces of a coded allreduce, and more data than links accept at once before they slow down.
constexpr size_t kValues = 2 << 20;
// Rounds of each candidate; the first one is not counted.
constexpr size_t kRounds = 5;
// int8 must take at most this share of the time without a codec: encoding takes processor time from the training.
constexpr double kWorth = 0.8;

std::shared_ptr<Operation> reduction(ReduceOp op, DType dtype, void* values, size_t count,
                                     std::shared_ptr<void> memory) {
  auto request = std::make_shared<Request>();
  request->op = op;
  request->members = {{"trial of codecs", dtype, {static_cast<int64_t>(count)}}};
  auto* const data = static_cast<std::byte*>(values);
  auto operation = operation_of(std::move(request), {{data, data}}, 0, std::make_shared<Handle>(0));
  operation->memory = std::move(memory);
  return operation;
}

double median_of(std::vector<double> seconds) {
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

}  // namespace

CodecTrial::CodecTrial(const std::vector<std::vector<int>>& hosts)
    : hosts_(hosts.size()), values_(std::make_shared<std::vector<float>>(kValues)) {
  for (const auto& host : hosts) ranks_ += host.size();
  for (size_t i = 0; i < kValues; ++i) (*values_)[i] = static_cast<float>(i % 255) - 127;
}

std::shared_ptr<Operation> CodecTrial::next() {
  const auto now = Clock::now();
  if (begun_ > 0 && begun_ <= kRounds * kCandidates.size()) {
    seconds_[(begun_ - 1) % kCandidates.size()].push_back(std::chrono::duration<double>(now - since_).count());
  }
  const size_t number = begun_++;
  if (number > kRounds * kCandidates.size()) return nullptr;
  if (number == kRounds * kCandidates.size()) {
    medians_ = std::make_shared<std::array<double, kCandidates.size()>>();
    for (size_t i = 0; i < kCandidates.size(); ++i)
      (*medians_)[i] = median_of({seconds_[i].begin() + 1, seconds_[i].end()});
    return reduction(ReduceOp::sum, DType::float64, medians_->data(), medians_->size(), medians_);
  }
  auto operation = reduction(ReduceOp::average, DType::float32, values_->data(), values_->size(), values_);
  operation->contributors = static_cast<int>(ranks_);
  operation->codec = kCandidates[number % kCandidates.size()];
  operation->buffers[0].figures = figures_;
  since_ = now;
  return operation;
}

CodecKind CodecTrial::chosen() const {
  return (*medians_)[1] < kWorth * (*medians_)[0] ? CodecKind::int8 : CodecKind::none;
}

void CodecTrial::say(const Compression& asked) const {
  const CodecKind kind = chosen();
  // A bucket has tensors of one codec, and between hosts rounding depends on the bucket. So no codec is repeated as a
  // codec that never encodes.
  std::string repeat = "start=" + (kind == CodecKind::none ? "10**18" : std::to_string(asked.start));
  if (!asked.error_feedback) repeat += ", error_feedback=False";
  const auto milliseconds = [&](size_t i) { return (*medians_)[i] / static_cast<double>(ranks_) * 1e3; };
  std::fprintf(
      stderr,
      "horovodish: Compression.auto chose %s: an allreduce of %zu MiB between %zu hosts took %.0f ms as it is and %.0f "
      "ms "
      "in int8, which must take at most %.0f %%. compression=Compression.int8(%s) repeats this run bit by bit, "
      "with the same where= if there is one\n",
      std::string(name_of(kind)).c_str(), kValues * sizeof(float) >> 20, hosts_, milliseconds(0), milliseconds(1),
      kWorth * 100, repeat.c_str());
}

void CodecTrial::say_one_host() {
  std::fprintf(
      stderr,
      "horovodish: Compression.auto chose none: all ranks are on one host, and codes travel between hosts only. "
      "compression=Compression.none repeats this run bit by bit\n");
}

}  // namespace horovodish
