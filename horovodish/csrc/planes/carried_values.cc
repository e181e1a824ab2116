#include "planes/carried_values.h"

#include <algorithm>
#include <cstdint>

#include "negotiation/tree.h"
#include "planes/fusion.h"
#include "planes/mpi/schedule.h"

namespace horovodish {

namespace {

// The limit for the values of all ranks together. With two hosts of one rank each, 4 B take 34 us instead of 51, and 1
// KiB of each rank takes 36 us instead of 46. From 2 KiB on, copying the messages costs what the trip saves.
constexpr size_t kCarriedBytes = 2 << 10;
// Each dtype's values begin at a multiple of this.
constexpr size_t kAlignment = 8;

size_t most_bytes_of(size_t ranks) { return kCarriedBytes / ranks / kAlignment * kAlignment; }

size_t aligned(size_t bytes) { return ceil_divide(bytes, kAlignment) * kAlignment; }

}  // namespace

size_t most_carried_bytes(const std::vector<std::vector<int>>& hosts) {
  size_t ranks = 0;
  for (const auto& host : hosts) ranks += host.size();
  // Ranks that exchange with each other; two always exchange everything.
  const auto peers = static_cast<int>(hosts.size());
  size_t bytes = most_bytes_of(ranks);
  while (bytes > 0 && peers > 2 && fastest_allreduce(peers, bytes) != AllreduceAlgorithm::direct) bytes -= kAlignment;
  return bytes;
}

CarriedValues::CarriedValues(const ProcessSetConfig& config)
    : ranks_(config.ranks.size()),
      one_host_(config.hosts.size() == 1),
      most_reduced_(most_carried_bytes(config.hosts)),
      most_broadcast_(most_bytes_of(ranks_)),
      own_(config.world_rank(config.own)) {
  const std::vector<int> tree = subtree(config.hosts, config.hosts.front().front());
  for (const auto& host : config.hosts) {
    auto& places = places_.emplace_back();
    for (const int index : host) {
      places.push_back(static_cast<size_t>(std::find(tree.begin(), tree.end(), index) - tree.begin()));
    }
  }
  // The plane reduces in the order of ranks, unless it reduces within hosts first.
  if (config.hosts.size() == ranks_) {
    auto& places = places_.front();
    for (size_t host = 1; host < ranks_; ++host) places.push_back(places_[host].front());
    places_.resize(1);
  }
}

size_t CarriedValues::bytes_of_a_rank(const Request& request) const {
  const bool reduces =
      request.kind == Kind::allreduce && request.op != ReduceOp::adasum && request.compression.kind == CodecKind::none;
  if (one_host_ || !request.on_host() || (!reduces && request.kind != Kind::broadcast)) return 0;
  const size_t most = reduces ? most_reduced_ : most_broadcast_;
  size_t bytes = 0;
  for (const Member& member : request.members) {
    bytes += aligned(static_cast<size_t>(member.count()) * bytes_of(member.dtype));
    if (bytes > most) return 0;
  }
  return bytes;
}

std::string CarriedValues::of(const Operation& operation) const {
  const Request& request = *operation.request;
  std::string values(bytes_of_a_rank(request), '\0');
  if (values.empty() || (request.kind == Kind::broadcast && request.root != own_)) return {};
  auto* out = reinterpret_cast<std::byte*>(values.data());
  if (request.kind == Kind::broadcast) {
    const auto bytes = Concatenation::as_bytes(operation);
    bytes.pack(bytes.whole(), ReduceOp::sum, out);
    return values;
  }
  for (const Concatenation& concatenation : Concatenation::by_dtype(operation)) {
    concatenation.pack(concatenation.whole(), request.op, out);
    out += aligned(concatenation.count() * concatenation.item_bytes());
  }
  return values;
}

bool CarriedValues::finish(const Operation& operation, std::string_view values) const {
  const size_t bytes = bytes_of_a_rank(*operation.request);
  const bool is_broadcast = operation.request->kind == Kind::broadcast;
  if (bytes == 0 || values.size() != bytes * (is_broadcast ? 1 : ranks_)) return false;
  const Trace::Span span(operation.trace, is_broadcast ? Phase::unpack : Phase::reduce);
  if (is_broadcast) {
    const auto all = Concatenation::as_bytes(operation);
    all.unpack(all.whole(), reinterpret_cast<const std::byte*>(values.data()));
  } else {
    reduce_all(operation, values);
  }
  return true;
}

void CarriedValues::reduce_all(const Operation& operation, std::string_view values) const {
  const auto* in = reinterpret_cast<const std::byte*>(values.data());
  std::vector<std::byte> copy;
  // A short std::string keeps its text inside itself, at any address.
  if (reinterpret_cast<uintptr_t>(in) % kAlignment != 0) {
    copy.assign(in, in + values.size());
    in = copy.data();
  }
  const size_t stride = values.size() / ranks_;
  const ReduceOp op = operation.request->op;
  const Scaling scaling = operation.scaling();
  std::vector<std::byte> memory;
  std::vector<const void*> sources;
  for (const Concatenation& concatenation : Concatenation::by_dtype(operation)) {
    const size_t count = concatenation.count(), bytes = aligned(count * concatenation.item_bytes());
    memory.resize(bytes * places_.size());
    // In the order of StreamPlane: the ranks of a host first, then the hosts.
    const bool is_of_hosts = places_.size() > 1;
    const auto [first, last] = in_stages(concatenation.dtype(), op, scaling, ranks_);
    for (size_t host = 0; host < places_.size(); ++host) {
      sources.clear();
      for (const size_t place : places_[host]) sources.push_back(in + place * stride);
      reduce(concatenation.dtype(), op, memory.data() + host * bytes, sources.data(), sources.size(), count,
             is_of_hosts ? first : scaling);
    }
    if (is_of_hosts) {
      sources.clear();
      for (size_t host = 0; host < places_.size(); ++host) sources.push_back(memory.data() + host * bytes);
      reduce(concatenation.dtype(), op, memory.data(), sources.data(), sources.size(), count, last);
    }
    concatenation.unpack(concatenation.whole(), memory.data());
    in += bytes;
  }
}

}  // namespace horovodish
