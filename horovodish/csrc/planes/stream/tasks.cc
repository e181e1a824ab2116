#include "planes/stream/tasks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "arithmetic/copy_bytes.h"
#include "planes/fusion.h"
#include "planes/mpi/mpi_tasks.h"
#include "planes/shards.h"

namespace horovodish {

namespace {

// Up to this many bytes, every rank reduces the whole allreduce itself: the second wait for peers would cost more than
// the saved arithmetic.
constexpr size_t kUnsharedBytes = 16 << 10;

// The memory of a concatenation that travels in one piece: its only target, or a buffer if there are several targets.
class OnePiece {
 public:
  explicit OnePiece(const Concatenation& concatenation) : concatenation_(concatenation) {
    const auto& tensors = concatenation.tensors();
    memory_ = tensors.size() == 1 ? tensors.front().target : nullptr;
    if (memory_ != nullptr) return;
    fusion_buffer_ = std::make_unique_for_overwrite<std::byte[]>(concatenation.count() * concatenation.item_bytes());
    memory_ = fusion_buffer_.get();
  }

  std::byte* data() const { return memory_; }
  bool is_fused() const { return fusion_buffer_ != nullptr; }
  void pack(ReduceOp op, double scale) const {
    if (memory_ == concatenation_.tensors().front().source && scale == 1.0) return;
    concatenation_.pack(concatenation_.whole(), op, memory_, scale);
  }
  void unpack() const { concatenation_.unpack(concatenation_.whole(), memory_); }

 private:
  const Concatenation& concatenation_;
  std::unique_ptr<std::byte[]> fusion_buffer_;
  std::byte* memory_;
};

// Allreduce and reducescatter. A chunk is cut into shards. On each host, the owner of a shard reduces it, straight into
// the targets. With several hosts it reduces into the slot, and exchanges the shard with the owners on the other hosts,
// see HostShards.
//
// In an allreduce, all ranks want all shards. In a reducescatter, a shard belongs to the ranks in one place of their
// hosts: its owners. It has an area for each of them, and chunk k holds the k-th piece of each rank's part:
//
//     slot of a rank of 2 + 2    shard 0: for rank 0, for rank 2    shard 1: for rank 1, for rank 3
class ReduceTask : public StreamTask {
 public:
  ReduceTask(ReduceOp op, const Scaling& scaling, double packing_scale, ScatterLayout values, const StreamWorld& world,
             std::optional<Coding> coding)
      : concatenation_(std::move(values.concatenation)),
        begins_(std::move(values.begins)),
        op_(op),
        scaling_(scaling),
        staged_(in_stages(concatenation_.dtype(), op_, scaling_, world.size())),
        packing_scale_(packing_scale),
        coding_(coding),
        world_(world),
        item_(concatenation_.item_bytes()),
        unshared_(!scatters() && concatenation_.count() * item_ <= kUnsharedBytes),
        shards_(!world.in_slots() || unshared_ ? 1 : world.shards.count),
        areas_(ceil_divide(world.shards.places, shards_)),
        length_(scatters() ? 0 : concatenation_.count()),
        chunk_(world.chunk_of(concatenation_.count(), item_)),
        sources_(world.ranks) {
    if (!world.in_slots()) piece_.emplace(concatenation_);
    for (size_t rank = 0; rank + 1 < begins_.size(); ++rank) length_ = std::max(length_, wanted_by(rank).count);
    // With the smallest slots a line for each of 16384 ranks fits.
    const size_t lines = chunk_ * item_ / kCacheLine / (shards_ * world.hosts.size() * areas_);
    if (scatters() && world.in_slots()) chunk_ = std::max<size_t>(lines, 1) * kCacheLine / item_;
  }

  uint64_t chunks() const override { return ceil_divide(length_, chunk_); }
  Stages stages() const override {
    if (piece_) return {.publish = true, .combine = false, .collect = piece_->is_fused()};
    return {.publish = true, .combine = true, .collect = world_.several_hosts() || shares_results()};
  }

  void publish(uint64_t chunk, std::byte* slot) override {
    if (piece_) return piece_->pack(op_, packing_scale_);
    for (size_t shard = 0; shard < shards_; ++shard) {
      if (is_own(shard) && reduces_in_place()) continue;
      for_each_part(chunk, shard, [&](const Range& part, size_t at, size_t) {
        concatenation_.pack(part, op_, slot + at * item_, packing_scale_);
        world_.put(part.count * item_);
        if (coding_ && !is_own(shard)) give_away_errors(part, slot + at * item_);
      });
    }
  }

  void combine(uint64_t chunk, const Slots& slots) override {
    for (size_t shard = 0; shard < shards_; ++shard) {
      if (!is_own(shard) && !everybody_reduces()) continue;
      for_each_part(chunk, shard, [&](const Range& part, size_t at, size_t) { combine_part(part, at, slots); });
    }
  }

  std::vector<std::unique_ptr<MpiTask>> exchange(uint64_t chunk, uint64_t sequence, const Slots& slots) override {
    std::vector<std::unique_ptr<MpiTask>> tasks;
    const Scaling& scaling = piece_ ? scaling_ : staged_.second;
    std::byte* const memory = piece_ ? piece_->data() : slots[world_.own];
    for (size_t shard = 0; shard < shards_; ++shard) {
      if (!is_own(shard)) continue;
      std::vector<Range> of_hosts(world_.hosts.size());
      Range values{};  // of the concatenation, of an allreduce
      for_each_part(chunk, shard, [&](const Range& part, size_t at, size_t host) {
        if (part.count == 0) return;
        values = part;
        Range& its = of_hosts[host];
        if (its.count == 0) its.begin = at;
        its.count = at + part.count - its.begin;
      });
      const auto owner = [&](size_t host) { return shard % world_.hosts[host].size(); };
      const auto owners = world_.one_of_each_host(sequence, world_.shards.tag(shard), owner);
      if (scatters()) {
        tasks.push_back(make_reduce_scatter(owners, concatenation_.dtype(), op_, scaling, memory, of_hosts));
      } else if (const auto [begin, count] = of_hosts[0]; count > 0 && coding_) {
        // The factors so far, which keep partial sums in range. The codec has the range of float32.
        const double done = piece_ ? 1.0 : staged_.first.prescale;
        const Scaling rest{.prescale = done == scaling_.prescale ? 1.0 : scaling_.prescale / done,
                           .postscale = scaling_.postscale,
                           .divisor = scaling_.divisor};
        tasks.push_back(make_coded_allreduce(owners, *coding_, concatenation_, values, rest, memory + begin * item_));
      } else if (count > 0) {
        tasks.push_back(make_allreduce(owners, concatenation_.dtype(), op_, scaling, memory + begin * item_, count));
      }
    }
    return tasks;
  }

  void collect(uint64_t chunk, const Slots& slots) override {
    if (piece_) return piece_->unpack();
    for (size_t shard = 0; shard < shards_; ++shard) {
      if (is_own(shard) && !world_.several_hosts()) continue;
      if (scatters() && shard != world_.own % shards_) continue;
      const std::byte* const slot = slots[shard % world_.ranks];
      for_each_part(chunk, shard,
                    [&](const Range& part, size_t at, size_t) { concatenation_.unpack(part, slot + at * item_); });
    }
  }

 private:
  bool scatters() const { return !begins_.empty(); }
  bool is_own(size_t shard) const { return shard % world_.ranks == world_.own; }
  bool everybody_reduces() const { return unshared_ && !world_.several_hosts(); }
  // Returns whether an owner's result also goes to its neighbours within the host.
  bool shares_results() const { return !scatters() && !unshared_; }
  // This rank's shard is reduced from the tensor, unless the slot holds the identity or a scaled value.
  bool reduces_in_place() const {
    return !everybody_reduces() && packing_scale_ == 1.0 && concatenation_.tensors().front().source != nullptr;
  }
  Range wanted_by(size_t rank) const { return {begins_[rank], begins_[rank + 1] - begins_[rank]}; }

  // visit(range of the concatenation, its first element in the slot, the host that wants it)
  template <class Visit>
  void for_each_part(uint64_t chunk, size_t shard, Visit visit) const {
    if (!scatters()) {
      const Range whole = piece_of(length_, chunk_, chunk), part = shard_of(whole, shards_, item_, shard);
      return visit(part, part.begin - whole.begin, 0);
    }
    for (size_t host = 0; host < world_.hosts.size(); ++host) {
      for (size_t place = shard; place < world_.hosts[host].size(); place += shards_) {
        const Range wanted = wanted_by(world_.rank_at(host, place));
        Range part = piece_of(wanted.count, chunk_, chunk);
        part.begin += wanted.begin;
        const size_t area = (shard * world_.hosts.size() + host) * areas_ + place / shards_;
        visit(part, piece_ ? part.begin : area * chunk_, host);
      }
    }
  }

  void combine_part(const Range& part, size_t at, const Slots& slots) {
    const bool exchanged = world_.several_hosts();
    concatenation_.for_each_piece(
        part, [&](const Concatenation::Tensor& tensor, size_t first, size_t length, size_t position) {
          const size_t offset = (at + position) * item_;
          std::byte* const slot = slots[world_.own] + offset;
          std::byte* const target = exchanged || tensor.target == nullptr ? slot : tensor.target + first * item_;
          // Nobody wants the result here, and the slot may still be read by a neighbour.
          if (target == slot && !exchanged && !shares_results()) return;
          for (size_t rank = 0; rank < world_.ranks; ++rank) sources_[rank] = slots[rank] + offset;
          if (reduces_in_place()) sources_[world_.own] = tensor.source + first * item_;
          reduce(concatenation_.dtype(), op_, target, sources_.data(), world_.ranks, length,
                 exchanged ? staged_.first : scaling_);
          if (target != slot && shares_results()) copy_bytes(slot, target, length * item_);
          if (target == slot || shares_results()) world_.put(length * item_);
        });
  }

  // Adds this rank's errors to its packed values of other ranks' shards. The rounding to the dtype stays in the errors,
  // and values that are not finite take no error with them.
  void give_away_errors(const Range& part, std::byte* packed) const {
    if (scaling_.prescale == 0) return;
    const auto factor = static_cast<float>(scaling_.prescale);
    std::array<float, Codec::kTile> values, rounded;
    concatenation_.for_each_piece(
        part, [&](const Concatenation::Tensor& tensor, size_t first, size_t length, size_t position) {
          for (size_t begin = 0; tensor.errors_move && begin < length; begin += values.size()) {
            const size_t count = std::min(values.size(), length - begin);
            std::byte* const its = packed + (position + begin) * item_;
            float* const errors = tensor.errors + first + begin;
            load_floats(concatenation_.dtype(), its, values.data(), count, 1.0);
            for (size_t i = 0; i < count; ++i) rounded[i] = values[i] + errors[i] / factor;
            store_floats(concatenation_.dtype(), rounded.data(), its, count, 1.0);
            load_floats(concatenation_.dtype(), its, rounded.data(), count, 1.0);
            for (size_t i = 0; i < count; ++i) {
              const float left = (values[i] - rounded[i]) * factor + errors[i];
              if (std::isfinite(left)) errors[i] = left;
            }
          }
        });
  }

  const Concatenation concatenation_;
  const std::vector<size_t> begins_;
  const ReduceOp op_;
  const Scaling scaling_;
  const std::pair<Scaling, Scaling> staged_;  // with several hosts
  const double packing_scale_;
  const std::optional<Coding> coding_;
  const StreamWorld world_;
  const size_t item_;
  const bool unshared_;  // every rank of a host reduces for itself
  const size_t shards_;
  const size_t areas_;  // of a shard: one for each host; several only if there are fewer tags than places
  size_t length_;  // of the vector that is cut into chunks: the values, or the most that a rank gets
  size_t chunk_;
  std::optional<OnePiece> piece_;
  std::vector<const void*> sources_;
};

// The root publishes, and all ranks take. With several hosts, the root sends each chunk to one rank of every other
// host, and the neighbours of that rank find the chunk in its slot.
class BroadcastTask : public StreamTask {
 public:
  BroadcastTask(const Operation& operation, const StreamWorld& world)
      : concatenation_(Concatenation::as_bytes(operation)),
        world_(world),
        chunk_(world.chunk_of(concatenation_.count(), 1)) {
    if (!world.in_slots() && concatenation_.count() > 0) piece_.emplace(concatenation_);
    for (const auto& host : world.hosts) {
      const auto found = std::find(host.begin(), host.end(), operation.root);
      if (found != host.end()) root_host_ = entries_.size();
      entries_.push_back(found == host.end() ? 0 : static_cast<size_t>(found - host.begin()));
    }
    source_ = entries_[world.host];
    is_root_ = world.own == source_ && world.host == root_host_;
  }

  uint64_t chunks() const override { return ceil_divide(concatenation_.count(), chunk_); }
  Stages stages() const override {
    if (piece_) return {.publish = true, .combine = false, .collect = piece_->is_fused()};
    return {.publish = true, .combine = !world_.several_hosts(), .collect = world_.several_hosts()};
  }

  void publish(uint64_t chunk, std::byte* slot) override {
    if (!is_root_) return;
    if (piece_) return piece_->pack(ReduceOp::sum, 1.0);
    concatenation_.pack(whole(chunk), ReduceOp::sum, slot);
    world_.put(whole(chunk).count);
  }
  void combine(uint64_t chunk, const Slots& slots) override { take(chunk, slots); }
  std::vector<std::unique_ptr<MpiTask>> exchange(uint64_t chunk, uint64_t sequence, const Slots& slots) override {
    std::vector<std::unique_ptr<MpiTask>> tasks;
    if (world_.own != source_) return tasks;
    const auto entry = [&](size_t host) { return entries_[host]; };
    tasks.push_back(make_broadcast(world_.one_of_each_host(sequence, 0, entry), static_cast<int>(root_host_),
                                   piece_ ? piece_->data() : slots[world_.own], whole(chunk).count));
    return tasks;
  }
  void collect(uint64_t chunk, const Slots& slots) override {
    if (piece_) return piece_->unpack();
    take(chunk, slots);
  }

 private:
  Range whole(uint64_t chunk) const { return piece_of(concatenation_.count(), chunk_, chunk); }
  void take(uint64_t chunk, const Slots& slots) {
    if (is_root_) return concatenation_.move(whole(chunk));
    concatenation_.unpack(whole(chunk), slots[source_]);
  }

  const Concatenation concatenation_;
  const StreamWorld world_;
  const size_t chunk_;
  std::optional<OnePiece> piece_;
  size_t source_ = 0;  // the rank of this host whose slot gets the data
  std::vector<size_t> entries_;  // by host: that rank
  size_t root_host_ = 0;
  bool is_root_ = false;
};

}  // namespace

std::shared_ptr<StreamTask> make_reduce_task(ReduceOp op, const Scaling& scaling, double packing_scale,
                                             ScatterLayout values, const StreamWorld& world,
                                             std::optional<Coding> coding) {
  return std::make_shared<ReduceTask>(op, scaling, packing_scale, std::move(values), world, coding);
}

std::vector<std::shared_ptr<StreamTask>> make_stream_tasks(const std::shared_ptr<Operation>& operation,
                                                           const StreamWorld& world) {
  const ReduceOp op = operation->request->op;
  std::vector<std::shared_ptr<StreamTask>> tasks;
  const auto reduce_all = [&](ScatterLayout values) {
    if (values.concatenation.count() == 0) return;
    std::optional<Coding> coding;
    if (operation->codec != CodecKind::none && is_floating(values.concatenation.dtype())) {
      const double share = operation->request->compression.share;
      coding.emplace(Coding{{operation->codec, share}, operation->code_seed, operation->trace});
    }
    tasks.push_back(op == ReduceOp::adasum ? make_adasum_task(*operation, std::move(values.concatenation), world)
                                           : make_reduce_task(op, operation->scaling(), operation->packing_scale(),
                                                              std::move(values), world, coding));
  };
  switch (operation->request->kind) {
    case Kind::allreduce:
      for (Concatenation& values : Concatenation::by_dtype(*operation)) reduce_all({std::move(values), {}});
      break;
    case Kind::reducescatter:
      for (ScatterLayout& values : scatter_layouts(*operation, world.own_rank(), world.size())) {
        reduce_all(std::move(values));
      }
      break;
    case Kind::allgather:
    case Kind::alltoall:
      tasks.push_back(make_rows_task(operation, world));
      break;
    case Kind::broadcast:
      tasks.push_back(std::make_shared<BroadcastTask>(*operation, world));
      break;
    case Kind::barrier:
    case Kind::join:
      break;  // done: every rank has submitted it
    case Kind::send:
    case Kind::receive:
      break;  // see pairs.h
  }
  return tasks;
}

void carry_out_alone(Operation& operation) {
  const Request& request = *operation.request;
  const Scaling scaling = operation.scaling();
  if (request.members.empty()) return;
  const Trace::Span span(operation.trace, request.kind == Kind::allreduce ? Phase::reduce : Phase::unpack);
  for (size_t i = 0; i < request.members.size(); ++i) {
    const Member& member = request.members[i];
    const Buffer& buffer = operation.buffers[i];
    const auto count = static_cast<size_t>(member.count());
    if (request.any_rows()) {
      const Handle::Output& output = allocate_rows(operation, i, buffer.rows);
      if (output.bytes > 0) copy_bytes(output.data.get(), buffer.source, output.bytes);
    } else if (scaling.prescale != 1.0 || scaling.postscale != 1.0) {
      const void* source = buffer.source;
      reduce(member.dtype, ReduceOp::sum, buffer.target, &source, 1, count, scaling);  // of one value all ops are alike
    } else if (buffer.target != buffer.source && count > 0) {
      copy_bytes(buffer.target, buffer.source, count * bytes_of(member.dtype));
    }
  }
}

}  // namespace horovodish
