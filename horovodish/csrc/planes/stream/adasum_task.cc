#include <utility>

#include "arithmetic/reduce.h"
#include "arithmetic/standard_floats.h"
#include "planes/adasum.h"
#include "planes/mpi/schedule_run.h"
#include "planes/stream/tasks.h"

namespace horovodish {

namespace {

// A chunk is cut into shards, one for each rank of all hosts. The tensors pass twice. In the first pass, the ranks of
// other hosts send each rank their values of its shard. The rank keeps these values, and adds up the products of its
// shard over all chunks. Then an allreduce adds up the tables of products. In the second pass, each rank puts the
// weighted sum of its shard into its slot. The sum goes once to each other host, to the rank in the same place there,
// and the neighbours of that rank find it in its slot.
class AdasumTask : public StreamTask {
 public:
  AdasumTask(const Operation& operation, Concatenation concatenation, const StreamWorld& world)
      : concatenation_(std::move(concatenation)),
        world_(world),
        item_(concatenation_.item_bytes()),
        chunk_(world.chunk_of(concatenation_.count(), item_)),
        data_chunks_(ceil_divide(concatenation_.count(), chunk_)),
        scale_(operation.request->prescale * operation.request->postscale),
        pairs_(world.size() * (world.size() + 1) / 2),
        products_(concatenation_.tensors().size() * pairs_),
        tables_(make_reduce_task(ReduceOp::sum, {}, 1.0, {tables(), {}}, world)),
        longest_(shard(whole(0), 0).count * item_),
        theirs_(std::make_shared<std::vector<std::byte>>(world.several_hosts() ? data_chunks_ * world.size() * longest_
                                                                               : 0)),
        memory_(world.in_slots() ? 0 : concatenation_.count() * item_) {}

  // No rank knows its products before it has seen all chunks, nor the weights before the tables are added up.
  uint64_t chunks() const override {
    if (all_chunks_known()) return 2 * data_chunks_ + tables_->chunks();
    return data_chunks_ + (multiplied_ == data_chunks_ ? tables_->chunks() : 0);
  }
  bool all_chunks_known() const override {
    return multiplied_ == data_chunks_ && (combining_adds_tables() || tables_added_ == tables_->chunks());
  }
  Stages stages() const override { return {.publish = true, .combine = true, .collect = true}; }

  void publish(uint64_t chunk, std::byte* slot) override {
    if (is_table(chunk)) return tables_->publish(chunk - data_chunks_, slot);
    concatenation_.pack(whole(chunk), ReduceOp::adasum, memory(slot));
    world_.put(whole(chunk).count * item_);
  }

  void combine(uint64_t chunk, const Slots& slots) override {
    if (is_table(chunk)) {
      if (tables_->stages().combine) tables_->combine(chunk - data_chunks_, slots);
      if (combining_adds_tables()) count_table();
    } else if (!is_first_pass(chunk)) {
      const Range part = shard(whole(chunk), world_.own_rank());
      weigh(part, sources(chunk, slots), memory(slots[world_.own]) + offset(chunk, part));
      world_.put(part.count * item_);
    } else if (!world_.several_hosts()) {
      multiply(chunk, slots);
    }
  }

  std::vector<std::unique_ptr<MpiTask>> exchange(uint64_t chunk, uint64_t sequence, const Slots& slots) override {
    if (is_table(chunk)) return tables_->exchange(chunk - data_chunks_, sequence, slots);
    const auto range_of = [&](size_t rank) {
      const Range part = shard(whole(chunk), rank);
      return Range{offset(chunk, part), part.count * item_};
    };
    const Range own = range_of(world_.own_rank());
    std::vector<Range> sent(world_.size()), received(world_.size());
    for (size_t host = 0; host < world_.hosts.size(); ++host) {
      if (host == world_.host) continue;
      for (size_t place = 0; place < world_.hosts[host].size(); ++place) {
        const size_t rank = world_.rank_at(host, place);
        if (is_first_pass(chunk)) {
          sent[rank] = range_of(rank);
          received[rank] = {theirs(chunk, rank), own.count};
        } else {
          if (world_.own % world_.hosts[host].size() == place) sent[rank] = own;
          if (place % world_.ranks == world_.own) received[rank] = range_of(rank);
        }
      }
    }
    const MpiEnvironment peers = world_.everybody(sequence);
    std::byte* const from = memory(slots[world_.own]);
    std::byte* const to = is_first_pass(chunk) ? theirs_->data() : from;
    std::vector<std::unique_ptr<MpiTask>> tasks;
    auto schedule = direct_exchange(peers.rank, peers.ranks(), sent, received, peers.segment_bytes);
    // The run keeps the memory of an abandoned transfer, which may still be written.
    const auto keep = [theirs = theirs_] {};
    tasks.push_back(std::make_unique<ScheduleRun>(peers, std::move(schedule), to, 1, nullptr, from, keep));
    return tasks;
  }

  void collect(uint64_t chunk, const Slots& slots) override {
    if (is_table(chunk)) {
      if (tables_->stages().collect) tables_->collect(chunk - data_chunks_, slots);
      if (!combining_adds_tables()) count_table();
    } else if (is_first_pass(chunk)) {
      if (world_.several_hosts()) multiply(chunk, slots);
    } else {
      for (size_t host = 0; host < world_.hosts.size(); ++host) {
        for (size_t place = 0; place < world_.hosts[host].size(); ++place) {
          const Range part = shard(whole(chunk), world_.rank_at(host, place));
          concatenation_.unpack(part, memory(slots[place % world_.ranks]) + offset(chunk, part));
        }
      }
    }
  }

 private:
  bool is_first_pass(uint64_t chunk) const { return chunk < data_chunks_; }
  bool is_table(uint64_t chunk) const { return !is_first_pass(chunk) && chunk < data_chunks_ + tables_->chunks(); }
  // Small tables on one host: the tensors' chunks follow at once.
  bool combining_adds_tables() const { return !world_.several_hosts() && !tables_->stages().collect; }
  void count_table() {
    if (++tables_added_ < tables_->chunks()) return;
    const StandardFloats mode;
    for (size_t tensor = 0; tensor < concatenation_.tensors().size(); ++tensor) {
      auto& weights = weights_.emplace_back(adasum_coefficients(products_.data() + tensor * pairs_, world_.size()));
      for (double& weight : weights) weight *= scale_;
    }
  }
  uint64_t of_tensors(uint64_t chunk) const {
    return is_first_pass(chunk) ? chunk : chunk - data_chunks_ - tables_->chunks();
  }
  Range whole(uint64_t chunk) const { return piece_of(concatenation_.count(), chunk_, of_tensors(chunk)); }
  Range shard(const Range& range, size_t rank) const { return shard_of(range, world_.size(), item_, rank); }
  size_t offset(uint64_t chunk, const Range& part) const { return (part.begin - whole(chunk).begin) * item_; }
  // The address of the values of a rank on another host.
  size_t theirs(uint64_t chunk, size_t rank) const { return (of_tensors(chunk) * world_.size() + rank) * longest_; }
  std::byte* memory(std::byte* slot) { return world_.in_slots() ? slot : memory_.data(); }

  // The values of this rank's shard from all ranks, by rank.
  std::vector<const std::byte*> sources(uint64_t chunk, const Slots& slots) {
    const Range part = shard(whole(chunk), world_.own_rank());
    std::vector<const std::byte*> result(world_.size());
    for (size_t host = 0; host < world_.hosts.size(); ++host) {
      for (size_t place = 0; place < world_.hosts[host].size(); ++place) {
        const size_t rank = world_.rank_at(host, place);
        result[rank] =
            host == world_.host ? memory(slots[place]) + offset(chunk, part) : theirs_->data() + theirs(chunk, rank);
      }
    }
    return result;
  }
  // The products that this rank has added up. The sum over all ranks replaces them.
  Concatenation tables() {
    Concatenation result(DType::float64);
    auto* const bytes = reinterpret_cast<std::byte*>(products_.data());
    result.append(bytes, bytes, products_.size());
    return result;
  }
  void multiply(uint64_t chunk, const Slots& slots) {
    const StandardFloats mode;
    const auto values = sources(chunk, slots);
    concatenation_.for_each_piece(shard(whole(chunk), world_.own_rank()), [&](const Concatenation::Tensor& tensor,
                                                                              size_t, size_t length, size_t position) {
      double* product = products_.data() + concatenation_.index_of(tensor) * pairs_;
      for (size_t i = 0; i < values.size(); ++i) {
        for (size_t j = i; j < values.size(); ++j) {
          *product++ += dot(concatenation_.dtype(), values[i] + position * item_, values[j] + position * item_, length);
        }
      }
    });
    ++multiplied_;
  }
  // Computes the result for these elements.
  void weigh(Range range, const std::vector<const std::byte*>& values, std::byte* target) const {
    std::vector<const void*> pieces(values.size());
    concatenation_.for_each_piece(
        range, [&](const Concatenation::Tensor& tensor, size_t, size_t length, size_t position) {
          for (size_t rank = 0; rank < values.size(); ++rank) pieces[rank] = values[rank] + position * item_;
          weighted_sum(concatenation_.dtype(), target + position * item_, pieces.data(),
                       weights_[concatenation_.index_of(tensor)].data(), values.size(), length);
        });
  }

  const Concatenation concatenation_;
  const StreamWorld world_;
  const size_t item_, chunk_;
  const uint64_t data_chunks_;
  const double scale_;  // of the result
  const size_t pairs_;
  std::vector<double> products_;  // by tensor: of every pair of ranks i <= j
  const std::shared_ptr<StreamTask> tables_;
  std::vector<std::vector<double>> weights_;  // by tensor: of every rank, once the tables are added up
  const size_t longest_;           // bytes of a shard
  const std::shared_ptr<std::vector<std::byte>> theirs_;  // values of the own shards, by chunk and rank
  std::vector<std::byte> memory_;                         // the only chunk, if there are no slots
  uint64_t multiplied_ = 0, tables_added_ = 0;  // chunks
};

}  // namespace

std::shared_ptr<StreamTask> make_adasum_task(const Operation& operation, Concatenation concatenation,
                                             const StreamWorld& world) {
  return std::make_shared<AdasumTask>(operation, std::move(concatenation), world);
}

}  // namespace horovodish
