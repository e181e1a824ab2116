#include "planes/stream/stream.h"

#include <algorithm>
#include <utility>

#include "planes/stream/tasks.h"

namespace horovodish {

namespace {
// Steps per advance(), so that the engine also looks at its messages while a large tensor streams.
constexpr int kStepsPerAdvance = 16;
// Within a host, chunks of fewer segments would travel whole: nothing is combined or collected meanwhile.
constexpr size_t kSegmentsOfChunk = 4;
}  // namespace

StreamPlane::StreamPlane(const ProcessSetConfig& config, const EngineOptions& options, Arena* arena, OnEnd on_end)
    : world_{config},
      options_(options),
      arena_(config.hosts.size() < config.ranks.size() ? arena : nullptr),
      on_end_(std::move(on_end)) {
  if (arena_ != nullptr) {
    const size_t region = config.region;
    const std::vector<size_t>& local = config.local;
    slots_.resize(arena_->layout().slots);
    for (size_t rank = 0; rank < local.size(); ++rank) {
      counters_.push_back(&arena_->counters(region, local[rank]));
      if (rank != world_.own) peers_.push_back(&arena_->doorbell(local[rank]));
      for (size_t index = 0; index < slots_.size(); ++index)
        slots_[index].push_back(arena_->slot(region, local[rank], index));
    }
  } else {
    counters_.push_back(&own_counters_);
    slots_.assign(abi::MpiTags::kSlots, {nullptr});
  }
  for (auto* known : {&known_published_, &known_reduced_, &known_released_}) known->resize(counters_.size());
}

// If transfers are under way, the plane is being abandoned. A transfer with a peer that has gone or is stopped may
// never end, or may continue when nobody expects it, so the memory that it uses stays until the process ends.
StreamPlane::~StreamPlane() {
  for (Exchange& exchange : exchanges_) {
    for (auto& transfer : exchange.transfers) {
      transfer->cancel_receives();
      static_cast<void>(transfer.release());
    }
    if (arena_ != nullptr) {
      arena_->keep_addresses();
    } else {
      keep_for_ever(exchange.operation->memory);
      keep_for_ever(exchange.operation);  // for the results that the engine allocated
      keep_for_ever(exchange.task);
    }
  }
}

void StreamPlane::start(std::shared_ptr<Operation> operation) {
  if (operation->request->compression.kind == CodecKind::automatic && !world_.several_hosts() && is_first_rank() &&
      !std::exchange(said_one_host_, true)) {
    CodecTrial::say_one_host();
  }
  if (!trial_ && !(world_.several_hosts() && residuals_.needs_choice(*operation))) return begin(std::move(operation));
  waiting_.push_back(std::move(operation));
  if (trial_) return;
  trial_ = std::make_unique<CodecTrial>(world_.hosts);
  continue_trial();
}

// All ranks carry out the operations of the trial in the same order, and choose from the same sums, so they agree.
void StreamPlane::continue_trial() {
  if (std::shared_ptr<Operation> next = trial_->next()) {
    next->inner = [this] { continue_trial(); };
    return begin(std::move(next));
  }
  const Compression& asked = waiting_.front()->request->compression;
  residuals_.choose(trial_->chosen());
  if (is_first_rank()) trial_->say(asked);
  trial_.reset();
  for (auto& operation : std::exchange(waiting_, {})) start(std::move(operation));
}

void StreamPlane::begin(std::shared_ptr<Operation> operation) {
  const Request& request = *operation->request;
  if (arena_ == nullptr && !world_.several_hosts()) {
    carry_out_alone(*operation);
    return on_end_(operation, nullptr);
  }
  if (world_.several_hosts()) residuals_.begin_use(*operation);
  StreamWorld world = world_;
  world.segment_bytes = request.segment_bytes == 0 ? options_.ring_segment_bytes : request.segment_bytes;
  if (arena_ != nullptr) {
    world.slot_bytes = arena_->layout().chunk_bytes;
    world.chunk_bytes =
        request.chunk_bytes == 0 ? options_.chunk_bytes : std::min(request.chunk_bytes, world.slot_bytes);
  }
  if (arena_ != nullptr && world_.several_hosts()) {
    const size_t pieces = world_.shards.count * world_.hosts.size();
    world.segment_bytes = std::min(options_.ring_segment_bytes, options_.chunk_bytes / kSegmentsOfChunk);
    world.chunk_bytes = exchanged_chunk(world.chunk_bytes, world.segment_bytes, pieces, world.slot_bytes);
  }
  auto tasks = make_stream_tasks(operation, world);
  items_.push_back({std::move(operation), std::move(tasks)});
}

bool StreamPlane::advance() {
  bool progressed = false;
  for (int step = 0; step < kStepsPerAdvance; ++step) {
    pop_finished();
    if (items_.empty()) return progressed;
    follows_ = progressed;
    if (!collect_one() && !exchange_some() && !combine_one() && !publish_one()) break;
    progressed = true;
  }
  pop_finished();
  return progressed;
}

// The task at the cursor, after the finished ones; null if there is none or if its next chunk is not known yet.
const std::shared_ptr<StreamTask>* StreamPlane::current(Cursor& cursor) {
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
    const std::shared_ptr<StreamTask>& task = item.tasks[cursor.task];
    if (cursor.chunk < task->chunks()) return &task;
    if (!task->all_chunks_known()) return nullptr;
    ++cursor.task;
    cursor.chunk = 0;
  }
  return nullptr;
}

void StreamPlane::step(Cursor& cursor) {
  ++cursor.chunk;
  ++cursor.sequence;
}

bool StreamPlane::publish_one() {
  const auto* const found = current(publish_);
  if (found == nullptr) return false;
  StreamTask& task = **found;
  const uint64_t sequence = publish_.sequence;
  const uint64_t slots = slots_.size();
  if (sequence >= slots && !reached(known_released_, &StreamCounters::released, sequence - slots)) return false;
  if (task.stages().publish) {
    const Trace::Span span(operation_at(publish_)->trace, Phase::pack, follows_);
    task.publish(publish_.chunk, slots_of(sequence)[world_.own]);
  }
  announce(&StreamCounters::published, sequence);
  step(publish_);
  return true;
}

bool StreamPlane::combine_one() {
  if (combine_.sequence == publish_.sequence) return false;
  const std::shared_ptr<StreamTask>& task = *current(combine_);
  const uint64_t sequence = combine_.sequence;
  const std::shared_ptr<Operation>& operation = operation_at(combine_);
  if (task->stages().combine) {
    if (!reached(known_published_, &StreamCounters::published, sequence)) return false;
    const Trace::Span span(operation->trace, Phase::reduce, follows_);
    task->combine(combine_.chunk, slots_of(sequence));
  }
  if (world_.several_hosts()) {
    auto transfers = task->exchange(combine_.chunk, sequence, slots_of(sequence));
    exchanges_.push_back({sequence, operation, task, std::move(transfers)});
  } else {
    announce(&StreamCounters::reduced, sequence);
  }
  step(combine_);
  return true;
}

// All combined chunks are exchanged at once, and announced in order.
bool StreamPlane::exchange_some() {
  bool progressed = false;
  for (Exchange& exchange : exchanges_) {
    Trace::Span span(exchange.operation->trace, Phase::exchange, follows_);
    bool moved = false, is_recorded = true;
    for (const auto& transfer : exchange.transfers) {
      if (transfer->done() || !transfer->advance()) continue;
      moved = true;
      is_recorded &= transfer->records_phases();
    }
    if (is_recorded) span.cancel();
    progressed |= moved;
  }
  const auto done = [](const Exchange& exchange) {
    return std::all_of(exchange.transfers.begin(), exchange.transfers.end(),
                       [](const auto& task) { return task->done(); });
  };
  while (!exchanges_.empty() && done(exchanges_.front())) {
    announce(&StreamCounters::reduced, exchanges_.front().sequence);
    exchanges_.pop_front();
    progressed = true;
  }
  return progressed;
}

bool StreamPlane::collect_one() {
  if (collect_.sequence == combine_.sequence) return false;
  if (!exchanges_.empty() && exchanges_.front().sequence == collect_.sequence) return false;
  StreamTask& task = **current(collect_);
  const uint64_t sequence = collect_.sequence;
  if (task.stages().collect) {
    if (!reached(known_reduced_, &StreamCounters::reduced, sequence)) return false;
    const Trace::Span span(operation_at(collect_)->trace, Phase::unpack, follows_);
    task.collect(collect_.chunk, slots_of(sequence));
  }
  announce(&StreamCounters::released, sequence);
  step(collect_);
  return true;
}

void StreamPlane::pop_finished() {
  current(collect_);
  while (!items_.empty() && collect_.item > first_item_) {
    const std::shared_ptr<Operation> operation = std::move(items_.front().operation);
    items_.pop_front();
    ++first_item_;
    on_end_(operation, nullptr);
  }
}

// Returns whether all ranks have passed `counter` beyond chunk `sequence`.
bool StreamPlane::reached(std::vector<uint64_t>& known, std::atomic<uint64_t> StreamCounters::* counter,
                          uint64_t sequence) {
  for (size_t rank = 0; rank < known.size(); ++rank) {
    if (known[rank] > sequence) continue;
    known[rank] = (counters_[rank]->*counter).load(std::memory_order_acquire);
    if (known[rank] <= sequence) return false;
  }
  return true;
}

void StreamPlane::announce(std::atomic<uint64_t> StreamCounters::* counter, uint64_t sequence) {
  (counters_[world_.own]->*counter).store(sequence + 1, std::memory_order_release);
  for (Doorbell* peer : peers_) peer->ring();
}

}  // namespace horovodish
