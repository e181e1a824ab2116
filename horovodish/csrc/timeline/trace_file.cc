#include "timeline/trace_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace horovodish {

namespace {

// If a SIGKILL hits a write(), the kernel ends it between two pages, never within one. So every page of the file holds
// whole lines and is written by its own call.
constexpr size_t kPageBytes = 4096;
// An event holds at most three texts, and fits into a page.
constexpr size_t kLongestText = 500;

}  // namespace

std::string json_text(std::string_view value) {
  std::string text = "\"";
  for (const char character : value) {
    const auto byte = static_cast<unsigned char>(character);
    const bool within_character = (byte & 0xc0) == 0x80;  // UTF-8
    if (text.size() > kLongestText && !within_character) {
      text += "...";
      break;
    }
    if (byte < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", byte);
      text += escape;
      continue;
    }
    if (byte == '"' || byte == '\\') text += '\\';
    text += character;
  }
  return text + '"';
}

TraceFile::TraceFile(int descriptor, int process, int64_t origin)
    : descriptor_(descriptor), process_(std::to_string(process)), origin_(origin) {
  add_line("[\n");
}

TraceFile::~TraceFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void TraceFile::add(const Event& event) {
  line_ = first_ ? "{\"ph\":\"" : ",{\"ph\":\"";
  first_ = false;
  line_ += event.type;
  line_.append("\",\"pid\":").append(process_).append(",\"tid\":").append(std::to_string(event.track));
  if (event.at) time("ts", *event.at - origin_);
  if (event.length) time("dur", *event.length);
  if (event.type != 'E') line_.append(",\"name\":").append(json_text(event.name));
  if (event.type == 'i') line_ += ",\"s\":\"p\"";
  if (!event.arguments.empty()) line_.append(",\"args\":{").append(event.arguments).append("}");
  line_ += "}\n";
  add_line(line_);
}

void TraceFile::finish() {
  add_line("]\n");
  flush();
}

void TraceFile::time(std::string_view key, int64_t nanoseconds) {
  line_.append(",\"").append(key).append("\":");
  if (nanoseconds < 0) line_ += '-';
  const int64_t length = nanoseconds < 0 ? -nanoseconds : nanoseconds;
  line_ += std::to_string(length / 1000);
  const auto rest = static_cast<int>(length % 1000);
  const char digits[] = {'.', static_cast<char>('0' + rest / 100), static_cast<char>('0' + rest / 10 % 10),
                         static_cast<char>('0' + rest % 10)};
  line_.append(digits, sizeof digits);
}

void TraceFile::add_line(std::string_view line) {
  const size_t room = kPageBytes - written_ % kPageBytes;
  if (page_.size() + line.size() > room) {
    if (page_.size() < room) page_.append(room - page_.size() - 1, ' ') += '\n';
    flush();
  }
  page_ += line;
}

void TraceFile::flush() {
  write_whole(descriptor_, page_);
  written_ += page_.size();
  page_.clear();
}

void write_whole(int& descriptor, std::string_view text) {
  while (!text.empty() && descriptor >= 0) {
    const ssize_t count = write(descriptor, text.data(), text.size());
    if (count >= 0) {
      text.remove_prefix(static_cast<size_t>(count));
    } else if (errno != EINTR) {
      std::fprintf(stderr, "horovodish: warning: the timeline ends here, because it cannot be written: %s\n",
                   std::strerror(errno));
      ::close(std::exchange(descriptor, -1));
    }
  }
}

}  // namespace horovodish
