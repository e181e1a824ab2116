#include "planes/stream/tasks.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "arithmetic/copy_bytes.h"
#include "planes/fusion.h"
#include "planes/mpi/mpi_tasks.h"
#include "planes/shards.h"
#include "planes/stream/adasum_tasks.h"
#include "planes/stream/rows_task.h"

namespace horovodish {

namespace {

// An allreduce of at most this many bytes is reduced by every rank for itself: below, the second wait for the peers costs
// more than the arithmetic that it saves.
constexpr size_t kUnsharedBytes = 16 << 10;

// The memory of a concatenation that travels in one piece: the target where there is just one, otherwise a buffer of its own.
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

// Allreduce, and reducescatter within a host. A chunk is cut into shards, one for each rank of this host; the owner of a shard
// reduces it straight into the targets. With several hosts there are as many shards as the largest host has ranks, see HostShards,
// and their owners reduce them in the slot, where they are exchanged with the owners on the other hosts.
class ReduceTask : public StreamTask {
 public:
  // `unshared`: every rank of the host reduces for itself what it wants.
  ReduceTask(const Operation& operation, Concatenation concatenation, const StreamWorld& world, bool unshared)
      : concatenation_(std::move(concatenation)),
        op_(operation.request->op),
        scaling_(operation.scaling()),
        staged_(world.others == nullptr ? StagedScaling{}
                                        : in_stages(concatenation_.dtype(), op_, scaling_, world.size())),
        packing_scale_(operation.packing_scale()),
        world_(world),
        item_(concatenation_.item_bytes()),
        chunk_(world.chunk_of(concatenation_.count(), item_)),
        collects_(world.others != nullptr || !unshared),
        shards_(!world.in_slots() || unshared ? 1
                : world.others != nullptr     ? world.others->shards.count()
                                              : world.ranks),
        sources_(world.ranks) {
    if (moves_tensors()) piece_.emplace(concatenation_);
  }

  uint64_t chunks() const override { return ceil_divide(concatenation_.count(), chunk_); }
  Stages stages() const override {
    if (moves_tensors()) return {.publish = true, .combine = false, .collect = piece_->is_fused()};
    return {.publish = world_.in_slots(), .combine = true, .collect = collects_};
  }
  bool moves_tensors() const override { return !world_.in_slots() && world_.others != nullptr; }

  void publish(uint64_t chunk, std::byte* slot) override {
    if (piece_) return piece_->pack(op_, packing_scale_);
    const Range range = whole(chunk);
    for (size_t index = 0; index < shards_; ++index) {
      const Range part = shard(range, index);
      if (is_own(index) && reduces_in_place()) continue;
      concatenation_.pack(part, op_, slot + (part.begin - range.begin) * item_, packing_scale_);
    }
  }

  void combine(uint64_t chunk, const Slots& slots) override {
    const Range range = whole(chunk);
    for (size_t index = 0; index < shards_; ++index) {
      if (!collects_ || is_own(index)) combine_shard(range, shard(range, index), slots);
    }
  }

  std::vector<std::unique_ptr<MpiTask>> exchange(uint64_t chunk, uint64_t sequence, const Slots& slots) override {
    std::vector<std::unique_ptr<MpiTask>> tasks;
    const Range range = whole(chunk);
    const OtherHosts& others = *world_.others;
    for (size_t index = 0; index < shards_; ++index) {
      const Range part = shard(range, index);
      if (!is_own(index) || part.count == 0) continue;
      const auto owner = [&](size_t host) { return index % others.hosts[host].size(); };
      std::byte* const memory = piece_ ? piece_->data() : slots[world_.own] + (part.begin - range.begin) * item_;
      tasks.push_back(make_allreduce(world_.one_of_each_host(sequence, others.shards.tag(index), owner),
                                     concatenation_.dtype(), op_, piece_ ? scaling_ : staged_.last, memory,
                                     part.count));
    }
    return tasks;
  }

  void collect(uint64_t chunk, const Slots& slots) override {
    if (piece_) return piece_->unpack();
    const Range range = whole(chunk);
    for (size_t index = 0; index < shards_; ++index) {
      if (is_own(index) && world_.others == nullptr) continue;
      const Range part = shard(range, index);
      concatenation_.unpack(part, slots[index % world_.ranks] + (part.begin - range.begin) * item_);
    }
  }

 private:
  Range whole(uint64_t chunk) const { return piece_of(concatenation_.count(), chunk_, chunk); }
  Range shard(const Range& range, size_t index) const { return shard_of(range, shards_, item_, index); }
  bool is_own(size_t index) const { return index % world_.ranks == world_.own; }
  // The own shard is reduced from where it lies, unless it takes the identity or a scaled value from the slot.
  bool reduces_in_place() const {
    return collects_ && packing_scale_ == 1.0 && concatenation_.tensors().front().source != nullptr;
  }

  void combine_shard(const Range& range, const Range& part, const Slots& slots) {
    const bool exchanged = world_.others != nullptr;
    const Scaling& scaling = exchanged ? staged_.first : scaling_;
    concatenation_.for_each_piece(
        part, [&](const Concatenation::Tensor& tensor, size_t first, size_t length, size_t position) {
          // Nobody wants the result here, and the slot is still being read when each rank reduces for itself.
          if (!collects_ && tensor.target == nullptr) return;
          const size_t offset = (part.begin - range.begin + position) * item_;
          for (size_t rank = 0; rank < world_.ranks; ++rank) sources_[rank] = slots[rank] + offset;
          if (reduces_in_place()) sources_[world_.own] = tensor.source + first * item_;
          std::byte* const slot = slots[world_.own] + offset;
          std::byte* const target = exchanged || tensor.target == nullptr ? slot : tensor.target + first * item_;
          reduce(concatenation_.dtype(), op_, target, sources_.data(), world_.ranks, length, scaling);
          if (collects_ && target != slot) copy_bytes(slot, target, length * item_);
        });
  }

  const Concatenation concatenation_;
  const ReduceOp op_;
  const Scaling scaling_;
  const StagedScaling staged_;  // with several hosts
  const double packing_scale_;
  const StreamWorld world_;
  const size_t item_, chunk_;
  const bool collects_;
  const size_t shards_;
  std::optional<OnePiece> piece_;
  std::vector<const void*> sources_;
};

// Reducescatter between hosts: one ring of all ranks.
class ScatterTask : public StreamTask {
 public:
  ScatterTask(const Operation& operation, ScatterLayout values, const StreamWorld& world)
      : values_(std::move(values)),
        op_(operation.request->op),
        scaling_(operation.scaling()),
        packing_scale_(operation.packing_scale()),
        world_(world),
        piece_(values_.concatenation) {}

  uint64_t chunks() const override { return 1; }
  Stages stages() const override { return {.publish = true, .combine = false, .collect = piece_.is_fused()}; }
  bool moves_tensors() const override { return true; }
  void publish(uint64_t, std::byte*) override { piece_.pack(op_, packing_scale_); }
  std::vector<std::unique_ptr<MpiTask>> exchange(uint64_t, uint64_t sequence, const Slots&) override {
    std::vector<std::unique_ptr<MpiTask>> tasks;
    tasks.push_back(make_reduce_scatter(world_.everybody(sequence), values_.concatenation.dtype(), op_, scaling_,
                                        piece_.data(), values_.begins));
    return tasks;
  }
  void collect(uint64_t, const Slots&) override { piece_.unpack(); }

 private:
  const ScatterLayout values_;
  const ReduceOp op_;
  const Scaling scaling_;
  const double packing_scale_;
  const StreamWorld world_;
  const OnePiece piece_;
};

// The root publishes, everybody takes. With several hosts the root sends a chunk on to one rank of every other host, in
// whose slot its neighbours find it.
class BroadcastTask : public StreamTask {
 public:
  BroadcastTask(const Operation& operation, const StreamWorld& world)
      : concatenation_(Concatenation::as_bytes(operation)),
        world_(world),
        chunk_(world.chunk_of(concatenation_.count(), 1)),
        source_(static_cast<size_t>(operation.root)) {
    if (moves_tensors() && concatenation_.count() > 0) piece_.emplace(concatenation_);
    if (world.others == nullptr) {
      is_root_ = world.own == source_;
      return;
    }
    const auto& hosts = world.others->hosts;
    for (size_t host = 0; host < hosts.size(); ++host) {
      const auto found = std::find(hosts[host].begin(), hosts[host].end(), operation.root);
      entries_.push_back(found == hosts[host].end() ? 0 : static_cast<size_t>(found - hosts[host].begin()));
      if (found != hosts[host].end()) root_host_ = host;
    }
    source_ = entries_[world.others->host];
    is_root_ = world.own == source_ && world.others->host == root_host_;
  }

  uint64_t chunks() const override { return ceil_divide(concatenation_.count(), chunk_); }
  Stages stages() const override {
    if (piece_) return {.publish = true, .combine = false, .collect = piece_->is_fused()};
    const bool several = world_.others != nullptr;
    return {.publish = world_.in_slots(), .combine = !several, .collect = several};
  }
  bool moves_tensors() const override { return !world_.in_slots() && world_.others != nullptr; }

  void publish(uint64_t chunk, std::byte* slot) override {
    if (!is_root_) return;
    if (piece_) return piece_->pack(ReduceOp::sum, 1.0);
    concatenation_.pack(whole(chunk), ReduceOp::sum, slot);
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
  size_t source_;                // the rank of this host in whose slot the data appears
  std::vector<size_t> entries_;  // by host: that rank
  size_t root_host_ = 0;
  bool is_root_ = false;
};

}  // namespace

std::vector<std::shared_ptr<StreamTask>> make_stream_tasks(const std::shared_ptr<Operation>& operation,
                                                           const StreamWorld& world) {
  const Kind kind = operation->request->kind;
  std::vector<std::shared_ptr<StreamTask>> tasks;
  switch (kind) {
    case Kind::allreduce:
      for (Concatenation& concatenation : Concatenation::by_dtype(*operation)) {
        if (concatenation.count() == 0) continue;
        if (operation->request->op == ReduceOp::adasum) {
          tasks.push_back(make_adasum_task(*operation, std::move(concatenation), world));
        } else {
          const bool small = concatenation.count() * concatenation.item_bytes() <= kUnsharedBytes;
          tasks.push_back(std::make_shared<ReduceTask>(*operation, std::move(concatenation), world, small));
        }
      }
      break;
    case Kind::reducescatter: {
      const size_t own = world.others == nullptr ? world.own : static_cast<size_t>(world.others->own);
      for (ScatterLayout& values : scatter_layouts(*operation, own, world.size())) {
        if (values.concatenation.count() == 0) continue;
        if (world.others != nullptr) {
          tasks.push_back(std::make_shared<ScatterTask>(*operation, std::move(values), world));
        } else {
          tasks.push_back(std::make_shared<ReduceTask>(*operation, std::move(values.concatenation), world, true));
        }
      }
      break;
    }
    case Kind::allgather:
    case Kind::alltoall:
      tasks.push_back(make_rows_task(operation, world));
      break;
    case Kind::broadcast:
      tasks.push_back(std::make_shared<BroadcastTask>(*operation, world));
      break;
    case Kind::barrier:
    case Kind::join:
      break;  // that every rank has submitted it is all there is to do
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
