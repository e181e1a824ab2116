#include "timeline/record_file.h"

#include <unistd.h>

#include <utility>

#include "timeline/timeline_writer.h"
#include "timeline/trace_file.h"

namespace horovodish {

RecordFile::RecordFile(int descriptor, std::string_view about, int64_t origin)
    : descriptor_(descriptor), origin_(origin) {
  add_block("objects\n", std::string(about) + '\n');
}

RecordFile::~RecordFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void RecordFile::describe(uint32_t number, const TrackDescription& description) {
  const Request& request = *description.request;
  objects_ += "{\"track\":" + std::to_string(number) + ",\"name\":" + json_text(description.name) +
              ",\"kind\":" + json_text(name_of(request.kind)) + "," + arguments_of(request);
  if (!request.members.empty()) objects_ += ",\"dtype\":" + json_text(name_of(request.members.front().dtype));
  objects_ += std::string(",\"on_host\":") + (request.on_host() ? "true" : "false") + "}\n";
}

void RecordFile::take(const TimelineRecord& record) {
  records_.push_back(record);
  records_.back().at -= origin_;
}

void RecordFile::take(const Moment& moment) {
  objects_ += std::string(moment.begins_step ? "{\"step\":" : "{\"mark\":") + json_text(moment.name) +
              ",\"at\":" + std::to_string(moment.at - origin_) + "}\n";
}

void RecordFile::flush(uint64_t dropped, int64_t at) {
  if (std::exchange(dropped_, dropped) != dropped) {
    objects_ += "{\"dropped\":" + std::to_string(dropped) + ",\"at\":" + std::to_string(at - origin_) + "}\n";
  }
  add_block("objects\n", std::exchange(objects_, {}));
  add_block("records\n", {reinterpret_cast<const char*>(records_.data()), records_.size() * sizeof(TimelineRecord)});
  records_.clear();
}

void RecordFile::finish(int64_t at) {
  objects_ += "{\"ended\":" + std::to_string(at - origin_) + "}\n";
  flush(dropped_, at);
}

void RecordFile::add_block(std::string_view kind, std::string_view content) {
  if (content.empty()) return;
  const uint64_t length = content.size();
  std::string block(kind);
  block.append(reinterpret_cast<const char*>(&length), sizeof length).append(content);
  write_whole(descriptor_, block);
}

}  // namespace horovodish
