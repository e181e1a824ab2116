#include "negotiation/negotiation_messages.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace horovodish {

namespace {

using Id = ResponseCache::Id;

enum class Up : uint64_t {
  ready = Records::kOne,
  ready_run = Records::kRun,
  ready_with,  // joined ranks or absent members
  span,  // of the statements that follow in this message
  request,
  joined,
  waiting,
  heard,
  lost,
  note
};
enum class Down : uint64_t {
  execute = Records::kOne,
  execute_run = Records::kRun,
  execute_with,  // joined ranks or absent members
  execute_new,
  forget,
  fail,
  join_done,
  lost,
  note
};

// Statements less than this apart count as made at one time, so that they need not say it each.
constexpr double kMomentSeconds = 1e-4;

template <class Record>
void begin(Records& records, Record record) {
  records.begin(static_cast<uint64_t>(record));
}

bool is_same_moment(const Span& a, const Span& b) {
  return a.last_rank == b.last_rank && std::abs(a.first_seconds - b.first_seconds) < kMomentSeconds &&
         std::abs(a.last_seconds - b.last_seconds) < kMomentSeconds;
}

Id read_id(Reader& reader) { return static_cast<Id>(reader.number_below(1ull << 32)); }

Span read_span(Reader& reader, const RankSet& sender, double now) {
  const double last_seconds = std::min(reader.real(), now);
  if (sender.count() == 1) return {sender.first(), last_seconds, last_seconds};
  const WorldRank last_rank = reader.rank();
  return {last_rank, last_seconds - reader.real(), last_seconds};
}

Signatures read_signatures(Reader& reader) {
  Signatures signatures(reader.count());
  for (auto& [signature, ranks] : signatures) {
    signature = reader.text();
    ranks = RankSet::decode(reader);
    if (ranks.empty()) throw std::runtime_error("control message: a request of no rank");
  }
  if (signatures.empty()) throw std::runtime_error("control message: no request");
  return signatures;
}

std::vector<std::string> read_texts(Reader& reader) {
  std::vector<std::string> texts(reader.count());
  for (std::string& text : texts) text = reader.text();
  return texts;
}

}  // namespace

void UpwardWriter::ready(Id id, const Statement& statement) {
  write(statement.span);
  if (statement.joined.empty() && statement.absent.empty()) return records_.id(id);
  begin(records_, Up::ready_with);
  records_.number(id);
  statement.joined.encode(records_);
  records_.text(statement.absent);
}

void UpwardWriter::request(std::string_view name, const Signatures& signatures, const Statement& statement) {
  write(statement.span);
  begin(records_, Up::request);
  records_.text(name);
  statement.joined.encode(records_);
  records_.text(statement.absent);
  records_.number(signatures.size());
  for (const auto& [signature, ranks] : signatures) {
    records_.text(signature);
    ranks.encode(records_);
  }
}

void UpwardWriter::joined(WorldRank last_rank) {
  begin(records_, Up::joined);
  records_.number(static_cast<uint64_t>(last_rank));
}

void UpwardWriter::waiting(uint64_t decisions_seen) {
  begin(records_, Up::waiting);
  records_.number(decisions_seen);
}

void UpwardWriter::heard() { begin(records_, Up::heard); }

void UpwardWriter::lost(const Lost& lost) {
  begin(records_, Up::lost);
  lost.encode(records_);
}

void UpwardWriter::say(const Note& note) {
  begin(records_, Up::note);
  note.encode(records_);
}

void UpwardWriter::write(const Span& span) {
  if (span_ && is_same_moment(*span_, span)) return;
  span_ = span;
  begin(records_, Up::span);
  records_.real(span.last_seconds);
  if (leaf_) return;
  records_.number(static_cast<uint64_t>(*span.last_rank));
  records_.real(span.seconds());
}

std::string UpwardWriter::take() {
  span_.reset();
  return records_.take();
}

void read_upward(std::string_view message, const RankSet& sender, double now, Upward& receiver) {
  Reader reader(message);
  Statement statement;
  while (!reader.done()) {
    switch (static_cast<Up>(reader.number())) {
      case Up::span:
        statement.span = read_span(reader, sender, now);
        break;
      case Up::ready:
        receiver.ready(read_id(reader), statement);
        break;
      case Up::ready_run: {
        const auto first = read_id(reader), count = read_id(reader);
        for (Id i = 0; i < count; ++i) receiver.ready(first + i, statement);
        break;
      }
      case Up::ready_with: {
        const auto id = read_id(reader);
        const RankSet joined = RankSet::decode(reader);
        receiver.ready(id, {statement.span, joined, Mask(reader.text())});
        break;
      }
      case Up::request: {
        const std::string_view name = reader.text();
        const RankSet joined = RankSet::decode(reader);
        const Mask absent(reader.text());
        receiver.request(name, read_signatures(reader), {statement.span, joined, absent});
        break;
      }
      case Up::joined:
        receiver.joined(reader.rank());
        break;
      case Up::waiting:
        receiver.waiting(reader.number());
        break;
      case Up::heard:
        receiver.heard();
        break;
      case Up::lost:
        receiver.lost(Lost::decode(reader));
        break;
      case Up::note:
        receiver.say(Note::decode(reader));
        break;
      default:
        throw std::runtime_error("control message: unknown record");
    }
  }
}

void DownwardWriter::execute(Id id, int joined, const Mask& absent) {
  if (joined == 0 && absent.empty()) return records_.id(id);
  begin(records_, Down::execute_with);
  records_.number(id);
  records_.number(static_cast<uint64_t>(joined));
  records_.text(absent);
}

void DownwardWriter::execute_new(Id id, std::string_view name, std::string_view signature, int joined,
                                 const Mask& absent) {
  begin(records_, Down::execute_new);
  records_.number(id);
  records_.text(name);
  records_.text(signature);
  records_.number(static_cast<uint64_t>(joined));
  records_.text(absent);
}

void DownwardWriter::forget(Id id) {
  begin(records_, Down::forget);
  records_.number(id);
}

void DownwardWriter::fail(std::string_view name, std::string_view text, const std::vector<std::string>& families) {
  begin(records_, Down::fail);
  records_.text(name);
  records_.text(text);
  records_.number(families.size());
  for (const std::string& family : families) records_.text(family);
}

void DownwardWriter::join_done(WorldRank last_rank) {
  begin(records_, Down::join_done);
  records_.number(static_cast<uint64_t>(last_rank));
}

void DownwardWriter::give_up(const Lost& lost) {
  begin(records_, Down::lost);
  lost.encode(records_);
}

void DownwardWriter::announce(const Note& note) {
  begin(records_, Down::note);
  note.encode(records_);
}

void read_downward(std::string_view message, Downward& receiver) {
  Reader reader(message);
  while (!reader.done()) {
    switch (static_cast<Down>(reader.number())) {
      case Down::execute:
        receiver.execute(read_id(reader), 0, {});
        break;
      case Down::execute_run: {
        const auto first = read_id(reader), count = read_id(reader);
        for (Id i = 0; i < count; ++i) receiver.execute(first + i, 0, {});
        break;
      }
      case Down::execute_with: {
        const auto id = read_id(reader);
        const int joined = reader.positive_int();
        receiver.execute(id, joined, Mask(reader.text()));
        break;
      }
      case Down::execute_new: {
        const auto id = read_id(reader);
        const std::string_view name = reader.text(), signature = reader.text();
        const int joined = reader.positive_int();
        receiver.execute_new(id, name, signature, joined, Mask(reader.text()));
        break;
      }
      case Down::forget:
        receiver.forget(read_id(reader));
        break;
      case Down::fail: {
        const std::string_view name = reader.text(), text = reader.text();
        receiver.fail(name, text, read_texts(reader));
        break;
      }
      case Down::join_done:
        receiver.join_done(reader.rank());
        break;
      case Down::lost:
        receiver.give_up(Lost::decode(reader));
        break;
      case Down::note:
        receiver.announce(Note::decode(reader));
        break;
      default:
        throw std::runtime_error("control message: unknown record");
    }
  }
}

}  // namespace horovodish
