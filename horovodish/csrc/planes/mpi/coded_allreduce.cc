#include "planes/mpi/coded_allreduce.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "arithmetic/standard_floats.h"
#include "memory/clock.h"

namespace horovodish {

namespace {

// How many more pieces a rank contributes to before the result of the first one is sent.
constexpr size_t kLag = 8;
// Values in a piece. They stay in the cache, and MPI sends their codes without asking the receiver.
constexpr size_t kPiece = 64 << 10;

class Stopwatch {
 public:
  // Seconds since the last call, or since the construction.
  double lap() {
    const auto now = Clock::now();
    return std::chrono::duration<double>(now - std::exchange(last_, now)).count();
  }

 private:
  Clock::time_point last_ = Clock::now();
};

class CodedAllreduce : public MpiTask {
 public:
  CodedAllreduce(const MpiEnvironment& environment, const Coding& coding, const Concatenation& concatenation,
                 Range values, const Scaling& scaling, std::byte* memory)
      : environment_(environment),
        codec_(coding.codec),
        seed_(coding.seed),
        trace_(coding.trace),
        concatenation_(concatenation),
        values_(values),
        scaling_(scaling),
        memory_(memory),
        hosts_(environment.peers.size()),
        own_(static_cast<size_t>(environment.rank)),
        part_(std::max(kPiece / hosts_ / Codec::kTile, size_t{1}) * Codec::kTile),
        pieces_(ceil_divide(values.count, part_ * hosts_)),
        slots_(std::min(kLag + 2, pieces_)),
        code_bytes_(ceil_divide(codec_.bytes(part_of(0, 0).count), kCacheLine) * kCacheLine),
        sent_(slots_ * hosts_, environment.mpi, code_bytes_),
        received_(slots_ * hosts_, environment.mpi, code_bytes_) {}

  // Takes at most one step of each kind, because the engine also looks at its messages.
  bool advance() override {
    const StandardFloats mode;
    bool moved = post_receives();
    moved |= contribute();
    moved |= settle();
    moved |= take();
    if (taken_ == pieces_ && settled_ == pieces_ && !done_) done_ = all_sent();
    return moved || done_;
  }
  bool done() const override { return done_; }
  bool records_phases() const override { return true; }
  void cancel_receives() noexcept override {
    for (auto& requests : received_.requests) {
      for (MpiRequest& request : requests) request.cancel();
    }
  }

 private:
  enum Phase : size_t { kContribution, kResult };
  // Codes by phase, and by slot and host. Piece p uses slot p % slots_.
  struct Codes {
    Codes(size_t count, const abi::Mpi& mpi, size_t bytes)
        : requests{std::vector(count, MpiRequest(mpi)), std::vector(count, MpiRequest(mpi))},
          memory{std::vector<std::byte>(count * bytes), std::vector<std::byte>(count * bytes)} {}

    std::array<std::vector<MpiRequest>, 2> requests;
    std::array<std::vector<std::byte>, 2> memory;
  };

  size_t index(size_t piece, size_t host) const { return piece % slots_ * hosts_ + host; }
  std::byte* code(Codes& codes, Phase phase, size_t piece, size_t host) const {
    return codes.memory[phase].data() + index(piece, host) * code_bytes_;
  }
  // The elements of a piece that a host sums up: whole blocks, except in the last part.
  Range part_of(size_t piece, size_t host) const {
    const Range whole = piece_of(values_.count, part_ * hosts_, piece);
    const size_t length = ceil_divide(ceil_divide(whole.count, hosts_), codec_.block()) * codec_.block();
    const Range part = piece_of(whole.count, length, host);
    return {whole.begin + part.begin, part.count};
  }

  // How many contributions are sent before the result of piece `settled`.
  size_t before_result(size_t settled) const { return std::min(settled + kLag + 1, pieces_); }

  bool post_receives() {
    if (posted_[kResult] == pieces_) return false;
    const Phase phase = posted_[kContribution] == before_result(posted_[kResult]) ? kResult : kContribution;
    const size_t piece = posted_[phase];
    if (piece == (phase == kResult ? taken_ : settled_) + slots_) return false;
    for (size_t host = 0; host < hosts_; ++host) {
      const size_t count = part_of(piece, phase == kResult ? host : own_).count;
      if (host == own_ || count == 0) continue;
      received_.requests[phase][index(piece, host)].receive(code(received_, phase, piece, host), codec_.bytes(count),
                                                            environment_.peers[host], environment_.tag);
    }
    ++posted_[phase];
    return true;
  }

  bool contribute() {
    const size_t piece = contributed_;
    if (piece == before_result(settled_) || !ended(sent_, kContribution, piece)) return false;
    const Trace::Span span(trace_, horovodish::Phase::encode);
    for (size_t host = 0; host < hosts_; ++host) {
      const Range part = part_of(piece, host);
      if (host == own_ || part.count == 0) continue;
      std::byte* const out = code(sent_, kContribution, piece, host);
      Stopwatch stopwatch;
      for_each_tile(part, [&](const Range& tile, size_t at) {
        load(tile, tile_.data());
        encode(tile, tile_.data(), out + at);
      });
      spent(part, &CodeFigures::encode_seconds, stopwatch.lap());
      send(kContribution, piece, host, out, part);
    }
    ++contributed_;
    return true;
  }

  bool settle() {
    const size_t piece = settled_;
    if (piece == pieces_ || contributed_ < before_result(piece) || posted_[kContribution] <= piece) return false;
    if (!ended(received_, kContribution, piece) || !ended(sent_, kResult, piece)) return false;
    const Trace::Span span(trace_, horovodish::Phase::reduce);
    const Range part = part_of(piece, own_);
    std::byte* const out = code(sent_, kResult, piece, own_);
    double encoding = 0, decoding = 0;
    Stopwatch stopwatch;
    for_each_tile(part, [&](const Range& tile, size_t at) {
      load(tile, tile_.data());
      std::fill_n(sum_.data(), tile.count, 0.0f);
      for (size_t host = 0; host < hosts_; ++host) {
        if (host != own_) {
          decode(tile, code(received_, kContribution, piece, host) + at, sum_.data(), true);
          continue;
        }
        for (size_t i = 0; i < tile.count; ++i) sum_[i] += tile_[i];
      }
      decoding += stopwatch.lap();
      encode(tile, sum_.data(), out + at);
      encoding += stopwatch.lap();
      store(tile, out + at);
      decoding += stopwatch.lap();
    });
    spent(part, &CodeFigures::encode_seconds, encoding);
    spent(part, &CodeFigures::decode_seconds, decoding);
    for (size_t host = 0; host < hosts_; ++host) {
      if (host != own_ && part.count > 0) send(kResult, piece, host, out, part);
    }
    ++settled_;
    return true;
  }

  bool take() {
    const size_t piece = taken_;
    if (posted_[kResult] <= piece || !ended(received_, kResult, piece)) return false;
    const Trace::Span span(trace_, horovodish::Phase::decode);
    for (size_t host = 0; host < hosts_; ++host) {
      if (host == own_) continue;
      const std::byte* const in = code(received_, kResult, piece, host);
      const Range part = part_of(piece, host);
      Stopwatch stopwatch;
      for_each_tile(part, [&](const Range& tile, size_t at) { store(tile, in + at); });
      spent(part, &CodeFigures::decode_seconds, stopwatch.lap());
    }
    ++taken_;
    return true;
  }

  bool ended(Codes& codes, Phase phase, size_t piece) {
    MpiRequest* const requests = &codes.requests[phase][index(piece, 0)];
    return std::all_of(requests, requests + hosts_, [](MpiRequest& request) { return request.test(); });
  }
  bool all_sent() {
    for (size_t slot = 0; slot < slots_; ++slot) {
      if (!ended(sent_, kContribution, slot) || !ended(sent_, kResult, slot)) return false;
    }
    return true;
  }
  void send(Phase phase, size_t piece, size_t host, const std::byte* code, const Range& part) {
    const size_t bytes = codec_.bytes(part.count);
    sent_.requests[phase][index(piece, host)].send(code, bytes, environment_.peers[host], environment_.tag);
    spent(part, &CodeFigures::value_bytes, static_cast<double>(part.count * concatenation_.item_bytes()));
    spent(part, &CodeFigures::code_bytes, static_cast<double>(bytes));
  }

  // visit(range, where its code begins in the part's code)
  template <class Visit>
  void for_each_tile(const Range& part, Visit visit) const {
    for (size_t begin = 0; begin < part.count; begin += Codec::kTile) {
      visit(Range{part.begin + begin, std::min(Codec::kTile, part.count - begin)}, codec_.bytes(begin));
    }
  }

  // visit(tensor, first element within the tensor, elements, first element within the range)
  template <class Visit>
  void for_each_tensor(const Range& range, Visit visit) const {
    concatenation_.for_each_piece({values_.begin + range.begin, range.count}, visit);
  }
  // Divides the cost of a part among its tensors.
  void spent(const Range& part, double CodeFigures::* on, double amount) const {
    for_each_tensor(part, [&](const Concatenation::Tensor& tensor, size_t, size_t count, size_t) {
      tensor.figures->*on += amount * static_cast<double>(count) / static_cast<double>(part.count);
    });
  }
  void measure(const Concatenation::Tensor& tensor, double CodeFigures::* squares, const float* values,
               size_t count) const {
    if (!tensor.figures->measures_norms()) return;
    const auto square = [](double value, double same) { return value * same; };  // in float32 it may overflow
    const double sum = std::inner_product(values, values + count, values, 0.0, std::plus(), square);
    if (std::isfinite(sum)) tensor.figures->*squares += sum;
  }
  std::byte* at(const Range& tile) const { return memory_ + tile.begin * concatenation_.item_bytes(); }

  // This rank's contribution: its values plus the errors.
  void load(const Range& tile, float* values) const {
    load_floats(concatenation_.dtype(), at(tile), values, tile.count, scaling_.prescale);
    for_each_tensor(tile, [&](const Concatenation::Tensor& tensor, size_t first, size_t count, size_t at) {
      measure(tensor, &CodeFigures::gradient_squares, values + at, count);
      if (tensor.errors == nullptr) return;
      const float* const errors = tensor.errors + first;
      for (size_t i = 0; i < count; ++i) values[at + i] += errors[i];
    });
  }
  // Leaves the errors in place of the values. If the new errors are not finite, the kept errors do not change.
  void encode(const Range& tile, float* values, std::byte* code) const {
    codec_.encode(values, tile.count, code, seed_of(tile));
    for_each_tensor(tile, [&](const Concatenation::Tensor& tensor, size_t first, size_t count, size_t at) {
      measure(tensor, &CodeFigures::error_squares, values + at, count);
      if (tensor.errors == nullptr) return;
      float* const errors = tensor.errors + first;
      for (size_t i = 0; i < count; ++i) errors[i] = values[at + i] == values[at + i] ? values[at + i] : errors[i];
    });
  }
  void decode(const Range& tile, const std::byte* code, float* values, bool adds) const {
    codec_.decode(code, values, tile.count, seed_of(tile), adds);
  }
  void store(const Range& tile, const std::byte* code) {
    decode(tile, code, sum_.data(), false);
    store_floats(concatenation_.dtype(), sum_.data(), at(tile), tile.count, scaling_.postscale / scaling_.divisor);
  }
  uint64_t seed_of(const Range& tile) const { return seed_ + values_.begin + tile.begin; }

  const MpiEnvironment environment_;
  const Codec codec_;
  const uint64_t seed_;
  const Trace trace_;
  const Concatenation& concatenation_;
  const Range values_;
  const Scaling scaling_;
  std::byte* const memory_;
  const size_t hosts_, own_;
  const size_t part_;  // the most values in a part
  const size_t pieces_, slots_;
  const size_t code_bytes_;  // of the largest part
  Codes sent_, received_;
  std::array<size_t, 2> posted_{};  // pieces whose receives are posted, by phase
  size_t contributed_ = 0, settled_ = 0, taken_ = 0;  // pieces
  bool done_ = false;
  std::array<float, Codec::kTile> tile_{}, sum_{};
};

}  // namespace

std::unique_ptr<MpiTask> make_coded_allreduce(const MpiEnvironment& environment, const Coding& coding,
                                              const Concatenation& concatenation, Range values, const Scaling& scaling,
                                              std::byte* memory) {
  return std::make_unique<CodedAllreduce>(environment, coding, concatenation, values, scaling, memory);
}

}  // namespace horovodish
