#include <algorithm>
#include <deque>
#include <numeric>
#include <utility>

#include "arithmetic/copy_bytes.h"
#include "planes/stream/tasks.h"

namespace horovodish {

namespace {

// Every rank has a block for each host, with the rows that the ranks of that host get from it. The blocks of an
// allgather are the same for all hosts. First travels a table with the number of rows that each rank sends, then the
// rows.
//
// Within a host, a block goes through the sender's slot. To another host, it goes over the link once: to the rank with
// the sender's place on that host, whose neighbours find the block in its slot. If one host has more ranks than
// another, several places belong to one rank of the smaller host.
//
//     host 0   rank 0 ──block of rank 0──> rank 2   host 1
//              rank 1 ──block of rank 1──> rank 3          both read both slots
//
// A slot is cut into areas: one for each arriving block, and, for an alltoall, one for each block for another host. If
// every rank is a host, there are no slots: the operation is one chunk, and its members travel from the tensors into
// the outputs.
class RowsTask : public StreamTask {
 public:
  RowsTask(std::shared_ptr<Operation> operation, const StreamWorld& world)
      : operation_(std::move(operation)),
        world_(world),
        is_alltoall_(operation_->request->kind == Kind::alltoall),
        members_(operation_->buffers.size()),
        hosts_(world.hosts),
        host_(world.host),
        own_(world.own_rank()),
        places_(world.shards.places),
        arrivals_(ceil_divide(places_, world.shards.fewest_ranks) * hosts_.size()) {
    const size_t areas = arrivals_ + (sends_from_areas() ? hosts_.size() : 0);
    area_ = (hosts_.size() > 1 ? world.slot_bytes : world.chunk_bytes) / areas / kCacheLine * kCacheLine;
    if (operation_->request->by_elements) {
      lay_out_elements();
    } else {
      lay_out_table();
    }
  }

  uint64_t chunks() const override { return table_chunks_ + data_chunks_; }
  bool all_chunks_known() const override { return moves_tensors() || tables_read_ == table_chunks_; }
  Stages stages() const override {
    const bool several = world_.several_hosts();
    return {.publish = !moves_tensors(), .combine = !several, .collect = several && !moves_tensors()};
  }

  void publish(uint64_t chunk, std::byte* slot) override {
    const Concatenation& own = incoming_[own_];
    own.pack(part(own, chunk), ReduceOp::sum, slot + arrival(world_.own, host_));
    world_.put(part(own, chunk).count);
    for (size_t host = 0; sends_from_areas() && host < hosts_.size(); ++host) {
      outgoing_[host].pack(part(outgoing_[host], chunk), ReduceOp::sum, slot + departure(host));
    }
  }
  void combine(uint64_t chunk, const Slots& slots) override { take(chunk, slots); }
  void collect(uint64_t chunk, const Slots& slots) override { take(chunk, slots); }

  std::vector<std::unique_ptr<MpiTask>> exchange(uint64_t chunk, uint64_t sequence, const Slots& slots) override {
    std::vector<std::unique_ptr<MpiTask>> tasks;
    if (moves_tensors()) {
      tasks.push_back(std::make_unique<Run>(*this, sequence));
      return tasks;
    }
    for (size_t place = world_.own; place < places_; place += world_.ranks) {
      std::vector<Range> sent(hosts_.size()), received(hosts_.size());
      for (size_t host = 0; host < hosts_.size(); ++host) {
        if (host == host_) continue;
        if (place == world_.own) sent[host] = sent_to(host, chunk);
        if (place < hosts_[host].size()) {
          const Concatenation& theirs = incoming_[world_.rank_at(host, place)];
          received[host] = {arrival(place, host), part(theirs, chunk).count};
        }
      }
      // Of two ranks, each sends to the other one only at its own place, so one tag is enough.
      const auto holder = [&](size_t host) { return place % hosts_[host].size(); };
      const MpiEnvironment peers = world_.one_of_each_host(sequence, 0, holder);
      auto schedule = direct_exchange(peers.rank, peers.ranks(), sent, received, peers.segment_bytes);
      tasks.push_back(std::make_unique<ScheduleRun>(peers, std::move(schedule), slots[world_.own], 1));
    }
    return tasks;
  }

 private:
  bool moves_tensors() const { return !world_.in_slots(); }
  // A member if every rank is a host, or the table.
  struct Piece {
    const std::byte* source;
    std::byte* target;
    std::vector<Range> sent, received;  // in bytes, by rank
  };

  // For the case that every rank is a host: the table, then the members, several at once. They are one chunk, so other
  // operations overlap with them.
  class Run : public MpiTask {
   public:
    Run(RowsTask& task, uint64_t sequence) : task_(task), sequence_(sequence) { begin(); }

    bool advance() override {
      bool progressed = false;
      for (const auto& run : runs_) progressed |= run->advance();
      while (!runs_.empty() && runs_.front()->done()) {
        runs_.pop_front();
        if (task_.tables_read_ < task_.table_chunks_) {
          ++task_.tables_read_;
          task_.lay_out_rows();
          begun_ = 0;
        }
        begin();
        progressed = true;
      }
      return progressed;
    }
    bool done() const override { return runs_.empty(); }
    void cancel_receives() noexcept override {
      for (const auto& run : runs_) run->cancel_receives();
    }

   private:
    static constexpr size_t kAtOnce = 4;
    static_assert(kAtOnce <= abi::MpiTags::kExchanges);

    void begin() {
      for (; runs_.size() < kAtOnce && begun_ < task_.pieces_.size(); ++begun_) {
        const Piece& piece = task_.pieces_[begun_];
        const MpiEnvironment everybody = task_.world_.everybody(sequence_, begun_ % kAtOnce);
        auto schedule =
            direct_exchange(everybody.rank, everybody.ranks(), piece.sent, piece.received, everybody.segment_bytes);
        task_.keep_own(piece);
        runs_.push_back(
            std::make_unique<ScheduleRun>(everybody, std::move(schedule), piece.target, 1, nullptr, piece.source));
      }
    }

    RowsTask& task_;
    const uint64_t sequence_;
    std::deque<std::unique_ptr<ScheduleRun>> runs_;  // of pieces, in order
    size_t begun_ = 0;                               // pieces
  };

  void keep_own(const Piece& piece) const {
    const size_t bytes = piece.received[own_].count;
    std::byte* const to = piece.target + piece.received[own_].begin;
    const std::byte* const from = piece.source + piece.sent[own_].begin;
    if (to != from && bytes > 0) copy_bytes(to, from, bytes);
  }
  bool sends_from_areas() const { return is_alltoall_ && hosts_.size() > 1; }
  // The place of a block in the slot of the rank that holds it.
  size_t arrival(size_t place, size_t host) const { return (place / world_.ranks * hosts_.size() + host) * area_; }
  size_t departure(size_t host) const { return (arrivals_ + host) * area_; }
  Range part(const Concatenation& block, uint64_t chunk) const {
    return piece_of(block.count(), area_, chunk < table_chunks_ ? chunk : chunk - table_chunks_);
  }
  Range sent_to(size_t host, uint64_t chunk) const {
    if (is_alltoall_) return {departure(host), part(outgoing_[host], chunk).count};
    return {arrival(world_.own, host_), part(incoming_[own_], chunk).count};
  }
  uint64_t chunks_of(size_t largest_block) const { return ceil_divide(largest_block, area_); }

  void take(uint64_t chunk, const Slots& slots) {
    for (size_t place = 0; place < places_; ++place) {
      const std::byte* slot = slots[place % world_.ranks];
      for (size_t host = 0; host < hosts_.size(); ++host) {
        if (place >= hosts_[host].size() || world_.rank_at(host, place) == own_) continue;
        const Concatenation& block = incoming_[world_.rank_at(host, place)];
        block.unpack(part(block, chunk), slot + arrival(place, host));
      }
    }
    incoming_[own_].move(part(incoming_[own_], chunk));
    if (chunk < table_chunks_ && ++tables_read_ == table_chunks_) lay_out_rows();
  }

  // -- the table: the numbers that a rank tells the ranks of a host. Allgather: how many rows of each member it has.
  // Alltoall: how many rows of each member they get, by member and rank, and the size of its largest block in bytes.
  size_t numbers_for(size_t host) const { return is_alltoall_ ? members_ * hosts_[host].size() + 1 : members_; }
  int64_t told_by(size_t rank, size_t member, size_t place) const {
    return heard_[rank * numbers_for(host_) + (is_alltoall_ ? member * hosts_[host_].size() + place : member)];
  }

  void lay_out_table() {
    const size_t ranks = world_.size(), heard = numbers_for(host_);
    heard_.resize(ranks * heard);
    std::vector<Range> told_to(hosts_.size());
    for (size_t host = 0; host < hosts_.size(); ++host) {
      told_to[host] = {told_.size(), numbers_for(host)};
      if (host > 0 && !is_alltoall_) {
        told_to[host] = told_to[0];
        continue;
      }
      for (const Buffer& buffer : operation_->buffers) {
        if (!is_alltoall_) told_.push_back(buffer.rows[0]);
        for (const int to : hosts_[host]) {
          if (is_alltoall_) told_.push_back(buffer.rows[static_cast<size_t>(to)]);
        }
      }
      if (is_alltoall_) told_.push_back(static_cast<int64_t>(largest_block()));
    }
    const auto bytes = [](Range numbers) {
      return Range{numbers.begin * sizeof(int64_t), numbers.count * sizeof(int64_t)};
    };
    const auto* told = reinterpret_cast<const std::byte*>(told_.data());
    auto* const target = reinterpret_cast<std::byte*>(heard_.data());
    table_chunks_ = 1;
    if (moves_tensors()) {
      Piece& piece = pieces_.emplace_back(Piece{told, target, {}, {}});
      for (size_t rank = 0; rank < ranks; ++rank) {
        piece.sent.push_back(bytes(told_to[rank]));  // every rank is a host
        piece.received.push_back(bytes({rank * heard, heard}));
      }
      return;
    }
    incoming_.assign(ranks, Concatenation(DType::uint8));
    outgoing_.assign(hosts_.size(), Concatenation(DType::uint8));
    for (size_t rank = 0; rank < ranks; ++rank) {
      const Range its = bytes({rank * heard, heard});
      incoming_[rank].append(rank == own_ ? told + bytes(told_to[host_]).begin : nullptr, target + its.begin,
                             its.count);
    }
    size_t longest = 0;
    for (size_t host = 0; host < hosts_.size(); ++host) {
      const Range its = bytes(told_to[host]);
      if (host != host_) outgoing_[host].append(told + its.begin, nullptr, its.count);
      longest = std::max(longest, its.count);
    }
    table_chunks_ = chunks_of(longest);
  }

  // -- the rows
  size_t row(size_t member) const { return row_bytes(operation_->request->members[member]); }

  // The rows of a member that this rank sends to another one.
  Range sent_rows(size_t member, size_t to) const {
    const auto& rows = operation_->buffers[member].rows;
    if (!is_alltoall_) return {0, row(member) * static_cast<size_t>(rows[0])};
    const auto at = rows.begin() + static_cast<std::ptrdiff_t>(to);
    const auto before = static_cast<size_t>(std::accumulate(rows.begin(), at, int64_t{0}));
    return {row(member) * before, row(member) * static_cast<size_t>(*at)};
  }

  size_t largest_block() const {
    size_t largest = 0;
    for (const auto& host : hosts_) {
      size_t bytes = 0;
      for (size_t member = 0; member < members_; ++member) {
        for (const int to : host) bytes += sent_rows(member, static_cast<size_t>(to)).count;
      }
      largest = std::max(largest, bytes);
    }
    return largest;
  }

  void lay_out_rows() {
    const size_t ranks = world_.size();
    pieces_.clear();
    incoming_.assign(ranks, Concatenation(DType::uint8));
    outgoing_.assign(hosts_.size(), Concatenation(DType::uint8));
    for (size_t member = 0; member < members_; ++member) {
      std::vector<int64_t> rows;
      for (size_t rank = 0; rank < ranks; ++rank) rows.push_back(told_by(rank, member, world_.own));
      std::byte* target = allocate_rows(*operation_, member, rows).data.get();
      const std::byte* source = operation_->buffers[member].source;
      if (moves_tensors()) {
        pieces_.push_back(piece_of_member(member, rows, source, target));
        continue;
      }
      for (size_t rank = 0; rank < ranks; ++rank) target = append_rows(rank, member, source, target);
      for (size_t host = 0; host < hosts_.size(); ++host) {
        for (const int to : hosts_[host]) {
          if (!is_alltoall_ || host == host_) continue;
          const Range its = sent_rows(member, static_cast<size_t>(to));
          outgoing_[host].append(source + its.begin, nullptr, its.count);
        }
      }
    }
    if (moves_tensors()) return;
    size_t largest = 0;
    for (size_t rank = 0; rank < ranks; ++rank) {
      const size_t numbers = numbers_for(host_);
      largest = std::max(
          largest, is_alltoall_ ? static_cast<size_t>(heard_[(rank + 1) * numbers - 1]) : incoming_[rank].count());
    }
    data_chunks_ = chunks_of(largest);
  }

  // Every rank knows the place of each rank's part. The part lies in the targets already, or is copied there.
  void lay_out_elements() {
    const size_t ranks = world_.size();
    incoming_.assign(ranks, Concatenation(DType::uint8));
    for (const Concatenation& whole : Concatenation::by_dtype(*operation_)) {
      const size_t item = whole.item_bytes();
      for (const Concatenation::Tensor& tensor : whole.tensors()) {
        const Range range = tensor.range;
        Piece piece{tensor.source, tensor.target, {}, {}};
        for (size_t rank = 0; rank < ranks; ++rank) {
          const Range part = overlap(part_of(*operation_->request, whole.count(), rank, ranks), range);
          const size_t begin = (part.begin - range.begin) * item, bytes = part.count * item;
          incoming_[rank].append(rank == own_ ? tensor.source + begin : nullptr, tensor.target + begin, bytes);
          piece.received.push_back({begin, bytes});
        }
        piece.sent.assign(ranks, piece.received[own_]);
        pieces_.push_back(std::move(piece));
      }
    }
    size_t largest = 0;
    for (const Concatenation& block : incoming_) largest = std::max(largest, block.count());
    data_chunks_ = moves_tensors() ? 1 : chunks_of(largest);
  }

  Piece piece_of_member(size_t member, const std::vector<int64_t>& rows, const std::byte* source,
                        std::byte* target) const {
    Piece piece{source, target, {}, {}};
    size_t begin = 0;
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      piece.sent.push_back(sent_rows(member, rank));
      piece.received.push_back({begin, row(member) * static_cast<size_t>(rows[rank])});
      begin = piece.received.back().end();
    }
    return piece;
  }

  // Appends the rows of a member that `rank` has for the ranks of this host.
  std::byte* append_rows(size_t rank, size_t member, const std::byte* source, std::byte* target) {
    for (size_t place = 0; place < (is_alltoall_ ? hosts_[host_].size() : 1); ++place) {
      const size_t bytes = row(member) * static_cast<size_t>(told_by(rank, member, place));
      const bool mine = !is_alltoall_ || place == world_.own;
      const std::byte* own = source;
      if (rank == own_ && is_alltoall_) own += sent_rows(member, world_.rank_at(host_, place)).begin;
      incoming_[rank].append(rank == own_ ? own : nullptr, mine ? target : nullptr, bytes);
      if (mine) target += bytes;
    }
    return target;
  }

  const std::shared_ptr<Operation> operation_;
  const StreamWorld world_;
  const bool is_alltoall_;
  const size_t members_;
  const std::vector<std::vector<int>>& hosts_;  // ranks of the process set
  const size_t host_, own_;  // of this rank, and its index in the set
  const size_t places_, arrivals_;
  size_t area_ = 0;
  std::vector<int64_t> told_, heard_;  // by host and by rank
  std::vector<Concatenation> incoming_;  // by rank: its block for this host; this rank's own has sources
  std::vector<Concatenation> outgoing_;  // by host: this rank's block for it, where an alltoall has one
  std::vector<Piece> pieces_;
  uint64_t table_chunks_ = 0, tables_read_ = 0, data_chunks_ = 0;
};

}  // namespace

std::shared_ptr<StreamTask> make_rows_task(const std::shared_ptr<Operation>& operation, const StreamWorld& world) {
  return std::make_shared<RowsTask>(operation, world);
}

}  // namespace horovodish
