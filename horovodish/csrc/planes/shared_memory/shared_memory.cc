#include "planes/shared_memory/shared_memory.h"

#include <algorithm>

#include "planes/shared_memory/stream_tasks.h"

namespace horovodish {

namespace {
// Steps per advance(), so that the engine also looks at its messages while a large tensor streams.
constexpr int kStepsPerAdvance = 16;
}  // namespace

MpiEnvironment Across::ring(uint64_t sequence, size_t shard, const std::function<size_t(size_t)>& choose) const {
  std::vector<int> peers;
  for (size_t i = 0; i < hosts.size(); ++i) peers.push_back(hosts[i][choose(i)]);
  return {mpi, std::move(peers), static_cast<int>(host), tags.exchange(sequence, shards.tag(shard)), segment_bytes};
}

SharedMemoryPlane::SharedMemoryPlane(Arena& arena, size_t region, const std::vector<size_t>& local, size_t own,
                                     size_t chunk_bytes, std::optional<Across> across, OnComplete on_complete)
    : arena_(arena),
      own_(own),
      chunk_bytes_(chunk_bytes),
      slot_bytes_(arena.layout().chunk_bytes),
      across_(std::move(across)),
      on_complete_(std::move(on_complete)),
      slots_(arena.layout().slots),
      known_published_(local.size()),
      known_reduced_(local.size()),
      known_released_(local.size()) {
  for (size_t rank = 0; rank < local.size(); ++rank) {
    counters_.push_back(&arena.counters(region, local[rank]));
    if (rank != own) peers_.push_back(&arena.header(local[rank]).doorbell);
    for (size_t index = 0; index < slots_.size(); ++index)
      slots_[index].push_back(arena.slot(region, local[rank], index));
  }
}

// See MpiRingPlane. What MPI moves here lies in the slots.
SharedMemoryPlane::~SharedMemoryPlane() {
  if (!exchanges_.empty()) arena_.keep_addresses();
  for (Exchange& exchange : exchanges_) {
    for (auto& task : exchange.tasks) {
      task->cancel_receives();
      static_cast<void>(task.release());
    }
  }
}

void SharedMemoryPlane::start(std::shared_ptr<Operation> operation) {
  const size_t wanted = operation->request->chunk_bytes;
  size_t chunk_bytes = wanted == 0 ? chunk_bytes_ : std::min(wanted, slot_bytes_);
  if (across_) {
    const size_t pieces = across_->shards.count() * across_->hosts.size();
    chunk_bytes = exchanged_chunk(chunk_bytes, across_->segment_bytes, pieces, slot_bytes_);
  }
  auto tasks = make_stream_tasks(operation, {own_, counters_.size(), chunk_bytes, across_ ? &*across_ : nullptr});
  items_.push_back({std::move(operation), std::move(tasks)});
}

Progress SharedMemoryPlane::advance() {
  bool progressed = false;
  for (int step = 0; step < kStepsPerAdvance; ++step) {
    pop_finished();
    if (items_.empty()) return progressed ? Progress::progressed : Progress::done;
    follows_ = progressed;
    if (!collect_one() && !exchange_some() && !combine_one() && !publish_one()) break;
    progressed = true;
  }
  pop_finished();
  return progressed ? Progress::progressed : Progress::pending;
}

// The task at the cursor, stepping over finished ones; null while there is none or its next chunk is not known yet.
StreamTask* SharedMemoryPlane::current(Cursor& cursor) {
  if (cursor.item < first_item_) {  // operations without chunks ended while this stage had nothing to do
    cursor.item = first_item_;
    cursor.task = 0;
    cursor.chunk = 0;
  }
  while (cursor.item < first_item_ + items_.size()) {
    const Item& item = items_[cursor.item - first_item_];
    if (cursor.task == item.tasks.size()) {
      ++cursor.item;
      cursor.task = 0;
      continue;
    }
    StreamTask& task = *item.tasks[cursor.task];
    if (cursor.chunk < task.chunks()) return &task;
    if (!task.all_chunks_known()) return nullptr;
    ++cursor.task;
    cursor.chunk = 0;
  }
  return nullptr;
}

void SharedMemoryPlane::step(Cursor& cursor) {
  ++cursor.chunk;
  ++cursor.sequence;
}

bool SharedMemoryPlane::publish_one() {
  StreamTask* task = current(publish_);
  if (task == nullptr) return false;
  const uint64_t sequence = publish_.sequence;
  const uint64_t slots = slots_.size();
  if (sequence >= slots && !reached(known_released_, &StreamCounters::released, sequence - slots)) return false;
  const Trace::Span span(operation_at(publish_).trace, Phase::pack, follows_);
  task->publish(publish_.chunk, slots_of(sequence)[own_]);
  announce(&StreamCounters::published, sequence);
  step(publish_);
  return true;
}

bool SharedMemoryPlane::combine_one() {
  if (combine_.sequence == publish_.sequence) return false;
  StreamTask* task = current(combine_);
  const uint64_t sequence = combine_.sequence;
  if (!reached(known_published_, &StreamCounters::published, sequence)) return false;
  const Operation& operation = operation_at(combine_);
  const Trace::Span span(operation.trace, Phase::reduce, follows_);
  task->combine(combine_.chunk, slots_of(sequence));
  if (across_) {
    exchanges_.push_back({sequence, &operation, task->exchange(combine_.chunk, sequence, slots_of(sequence))});
  } else {
    announce(&StreamCounters::reduced, sequence);
  }
  step(combine_);
  return true;
}

// All chunks that are combined exchange at once; they are announced in order.
bool SharedMemoryPlane::exchange_some() {
  bool progressed = false;
  for (Exchange& exchange : exchanges_) {
    Trace::Span span(exchange.operation->trace, Phase::exchange, follows_);
    bool moved = false;
    for (const auto& task : exchange.tasks) {
      if (!task->done()) moved |= task->advance();
    }
    if (!moved) span.cancel();
    progressed |= moved;
  }
  const auto done = [](const Exchange& exchange) {
    return std::all_of(exchange.tasks.begin(), exchange.tasks.end(), [](const auto& task) { return task->done(); });
  };
  while (!exchanges_.empty() && done(exchanges_.front())) {
    announce(&StreamCounters::reduced, exchanges_.front().sequence);
    exchanges_.pop_front();
    progressed = true;
  }
  return progressed;
}

bool SharedMemoryPlane::collect_one() {
  if (collect_.sequence == combine_.sequence) return false;
  if (!exchanges_.empty() && exchanges_.front().sequence == collect_.sequence) return false;
  StreamTask* task = current(collect_);
  const uint64_t sequence = collect_.sequence;
  if (task->has_collect()) {
    if (!reached(known_reduced_, &StreamCounters::reduced, sequence)) return false;
    const Trace::Span span(operation_at(collect_).trace, Phase::unpack, follows_);
    task->collect(collect_.chunk, slots_of(sequence));
  }
  announce(&StreamCounters::released, sequence);
  step(collect_);
  return true;
}

void SharedMemoryPlane::pop_finished() {
  current(collect_);
  while (!items_.empty() && collect_.item > first_item_) {
    const std::shared_ptr<Operation> operation = std::move(items_.front().operation);
    items_.pop_front();
    ++first_item_;
    on_complete_(operation);
  }
}

// Have all ranks passed `counter` beyond chunk `sequence`?
bool SharedMemoryPlane::reached(std::vector<uint64_t>& known, std::atomic<uint64_t> StreamCounters::* counter,
                                uint64_t sequence) {
  for (size_t rank = 0; rank < known.size(); ++rank) {
    if (known[rank] > sequence) continue;
    known[rank] = (counters_[rank]->*counter).load(std::memory_order_acquire);
    if (known[rank] <= sequence) return false;
  }
  return true;
}

void SharedMemoryPlane::announce(std::atomic<uint64_t> StreamCounters::* counter, uint64_t sequence) {
  (counters_[own_]->*counter).store(sequence + 1, std::memory_order_release);
  for (Doorbell* peer : peers_) peer->ring();
}

}  // namespace horovodish
