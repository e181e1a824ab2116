#include "timeline/timeline_writer.h"

#include <algorithm>
#include <array>
#include <utility>

namespace horovodish {

namespace {

using What = TimelineRecord::What;

constexpr std::array<std::string_view, 9> kPhaseNames{"pack", "reduce", "exchange", "unpack", "connect",
                                                      "nccl", "encode", "decode",   "wait"};

}  // namespace

std::string arguments_of(const Request& request) {
  size_t bytes = 0;
  for (const Member& member : request.members) bytes += row_bytes(member);
  std::string text = (request.any_rows() ? "\"row_bytes\":" : "\"bytes\":") + std::to_string(bytes) +
                     ",\"tensors\":" + std::to_string(request.members.size());
  if (request.members.size() > 1) {
    text +=
        ",\"first\":" + json_text(request.members.front().name) + ",\"last\":" + json_text(request.members.back().name);
  }
  return text;
}

TimelineWriter::TimelineWriter(int descriptor, int process, std::string_view name, int64_t origin)
    : file_(descriptor, process, origin) {
  file_.add({.type = 'M', .name = "process_name", .arguments = "\"name\":" + json_text(name)});
  file_.add({.type = 'M', .name = "process_sort_index", .arguments = "\"sort_index\":" + std::to_string(process)});
}

void TimelineWriter::take(const TimelineRecord& record) {
  if (record.what == What::cycle) return mark(kEngineTrack, "cycle", record.at);
  if (record.what == What::submitted) return submitted(record.track, record.at);
  if (record.track == kWaitsTrack) {
    name_track(kWaitsTrack, "waits");
    return slice(kWaitsTrack, "wait", record.at - static_cast<int64_t>(record.length), record.at);
  }
  if (!track(record.track).busy) return;
  switch (record.what) {
    case What::decided:
      end_waiting(record.track, record.at);
      tracks_[record.track].waits = "queue";
      break;
    case What::phase: {
      const int64_t begin = record.at - static_cast<int64_t>(record.length);
      end_waiting(record.track, begin);
      slice(record.track, kPhaseNames[static_cast<size_t>(record.phase)], begin, record.at);
      break;
    }
    default:
      end(record.track, record.at, record.what == What::failed);
  }
}

// A step lasts until the next one begins.
void TimelineWriter::take(const Moment& moment) {
  if (!moment.begins_step) return mark(kStepsTrack, moment.name, moment.at);
  name_track(kStepsTrack, "steps");
  if (track(kStepsTrack).busy) end(kStepsTrack, moment.at, false);
  Track& begun = track(kStepsTrack);
  begun.busy = true;
  begun.last = std::max(moment.at, begun.last);
  file_.add({'B', kStepsTrack, moment.name, begun.last});
}

void TimelineWriter::flush(uint64_t dropped, int64_t at) {
  if (const uint64_t more = dropped - std::exchange(dropped_, dropped); more > 0) {
    mark(kEngineTrack, "records dropped", at,
         "\"count\":" + std::to_string(more) + ",\"total\":" + std::to_string(dropped));
  }
  file_.flush();
}

void TimelineWriter::finish(int64_t at) {
  for (uint32_t number = 0; number < tracks_.size(); ++number) {
    if (tracks_[number].busy) end(number, at, false);
  }
  file_.finish();
}

void TimelineWriter::describe(uint32_t number, const TrackDescription& description) {
  name_track(number, description.name);
  Track& described = track(number);
  described.kind = name_of(description.request->kind);
  described.arguments = arguments_of(*description.request);
}

// Call it once.
void TimelineWriter::name_track(uint32_t number, std::string_view name) {
  if (std::exchange(track(number).named, true)) return;
  file_.add({.type = 'M', .track = number, .name = "thread_name", .arguments = "\"name\":" + json_text(name)});
}

TimelineWriter::Track& TimelineWriter::track(uint32_t number) {
  if (number >= tracks_.size()) tracks_.resize(number + 1);
  return tracks_[number];
}

void TimelineWriter::submitted(uint32_t number, int64_t at) {
  Track& begun = track(number);
  if (begun.busy) end(number, at, false);
  begun.busy = true;
  begun.waits = "negotiate";
  begun.last = std::max(at, begun.last);
  file_.add({'B', number, begun.kind, begun.last, {}, begun.arguments});
}

void TimelineWriter::end_waiting(uint32_t number, int64_t at) {
  Track& track = tracks_[number];
  if (!track.waits.empty()) slice(number, std::exchange(track.waits, {}), track.last, at);
}

// Writes a phase from `begin` to `end` that has a length and does not overlap the phase before.
void TimelineWriter::slice(uint32_t number, std::string_view name, int64_t begin, int64_t end) {
  Track& track = tracks_[number];
  begin = std::max(begin, track.last);
  track.last = std::max(end, begin + 1);
  file_.add({'X', number, name, begin, track.last - begin});
}

void TimelineWriter::end(uint32_t number, int64_t at, bool failed) {
  end_waiting(number, at);
  Track& track = tracks_[number];
  track.last = std::max(at, track.last);
  track.busy = false;
  file_.add({'E', number, {}, track.last, {}, failed ? "\"failed\":true" : ""});
}

void TimelineWriter::mark(uint32_t number, std::string_view name, int64_t at, std::string_view arguments) {
  name_track(number, number == kEngineTrack ? "engine" : "steps");
  file_.add({'i', number, name, at, {}, arguments});
}

}  // namespace horovodish
