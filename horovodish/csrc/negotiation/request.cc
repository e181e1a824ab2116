#include "negotiation/request.h"

#include <algorithm>
#include <locale>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace horovodish {

namespace {

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += shape[i] == Member::kAnyLength ? "any" : std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string number_text(double value) {
  std::ostringstream stream;
  stream.precision(17);
  stream << value;
  return stream.str();
}

std::string pair_text(size_t chunk, size_t segment) {
  return std::to_string(chunk) + " and " + std::to_string(segment) + " bytes";
}

// The codec as the user wrote it, without the arguments that he left out.
std::string compression_text(const Compression& its) {
  if (its.asked == CodecKind::none) return "Compression.none";
  return "Compression." + std::string(name_of(its.asked)) + "(" +
         (takes_share(its.asked) ? number_text(its.share) + ", " : "") +
         "error_feedback=" + (its.error_feedback ? "True" : "False") + ", start=" + std::to_string(its.start) + ")";
}

std::string place_text(const Request& request) { return request.on_host() ? "host memory" : "a CUDA device"; }

struct Difference {
  std::string subject, what, left, right, remedy;
};

std::string shape_remedy(const Request& request, const Member& member) {
  const bool is_of_model = request.kind == Kind::broadcast || member.name != request.name;
  if (request.kind != Kind::allgather && request.kind != Kind::alltoall) {
    return is_of_model ? "build the same model on every rank" : "pass a tensor of the same shape on every rank";
  }
  return "all dimensions but the first must be equal on every rank";
}

Difference member_difference(const Request& request, const Member& a, const Member& b) {
  if (a.name != b.name) {
    return {request.name, "tensors", "'" + a.name + "'", "'" + b.name + "'",
            "every rank must build the same model and pass its parameters in the same order"};
  }
  if (a.dtype != b.dtype) {
    return {a.name, "dtype", std::string(name_of(a.dtype)), std::string(name_of(b.dtype)),
            "convert the tensor to one dtype on every rank"};
  }
  return {a.name, "shape", shape_text(a.shape), shape_text(b.shape), shape_remedy(request, a)};
}

// A leaf that only one of the two has, if this operation shows it.
Difference tree_difference(const Request& a, const Request& b) {
  for (size_t i = 0; i < std::min(a.members.size(), b.members.size()); ++i) {
    if (a.members[i].name != b.members[i].name) return member_difference(a, a.members[i], b.members[i]);
  }
  const auto text = [](const Family& family) {
    return family.members == 0 ? std::string("none") : std::to_string(family.members) + " leaves";
  };
  return {a.family.name.empty() ? b.family.name : a.family.name, "tree", text(a.family),
          text(b.family) + (a.family.members == b.family.members ? " in other places" : ""),
          "pass a tree of the same structure on every rank"};
}

// The first difference; none if only the family differs: one of the ranks may make the same call from another function.
std::optional<Difference> first_difference(const Request& a, const Request& b) {
  if (a.function != b.function) {
    return Difference{a.name, "function", a.function, b.function,
                      "call the same functions in the same order on every rank"};
  }
  if (a.kind != b.kind) {
    return Difference{a.name, "collective", std::string(name_of(a.kind)), std::string(name_of(b.kind)),
                      shown(a.name)[0] == '\''
                          ? "every rank must call the same collective for a name; give the calls names of their own"
                          : "call the same collectives in the same order on every rank"};
  }
  if (a.by_elements != b.by_elements || a.ends != b.ends) {
    const auto text = [](const Request& its) {
      if (!its.by_elements) return std::string("rows");
      return its.ends.empty() ? "elements" : "elements that end at " + shape_text(its.ends);
    };
    return Difference{a.name, "parts", text(a), text(b),
                      "every rank must call the same collective for a name; give the calls names of their own"};
  }
  if (a.op != b.op) {
    return Difference{a.name, "reduction op", std::string(name_of(a.op)), std::string(name_of(b.op)),
                      "pass the same op on every rank"};
  }
  if (a.compression.kind != b.compression.kind && a.compression.asked == b.compression.asked) {
    const auto text = [](const Request& its) {
      return its.compression.kind == CodecKind::none ? std::string("none") : compression_text(its.compression);
    };
    return Difference{a.name, "compression", text(a), text(b),
                      "pass the same where= on every rank, and build the same model"};
  }
  if (a.compression != b.compression) {
    return Difference{a.name, "compression", compression_text(a.compression), compression_text(b.compression),
                      "pass the same compression on every rank"};
  }
  if (a.family.members != b.family.members) return tree_difference(a, b);
  const size_t common = std::min(a.members.size(), b.members.size());
  size_t first = 0;
  while (first < common && Member::fields(a.members[first]) == Member::fields(b.members[first])) ++first;
  const bool is_one = first < common && a.members[first].name == b.members[first].name;
  if (a.members.size() != b.members.size() && !is_one) {
    const auto& longer = a.members.size() > b.members.size() ? a.members : b.members;
    return Difference{
        a.name, "number of tensors", std::to_string(a.members.size()), std::to_string(b.members.size()),
        "every rank must pass the same tensors, with the same dtypes and compression, in the same order; '" +
            longer[first].name + "' is the first that another rank does not have there"};
  }
  if (first < common) return member_difference(a, a.members[first], b.members[first]);
  if (a.family.structure != b.family.structure) return tree_difference(a, b);
  const Difference others[] = {
      {a.name, "root rank", std::to_string(number_of(a.root)), std::to_string(number_of(b.root)),
       "pass the same root_rank on every rank"},
      {a.name, "prescale_factor", number_text(a.prescale), number_text(b.prescale),
       "pass the same prescale_factor on every rank"},
      {a.name, "postscale_factor", number_text(a.postscale), number_text(b.postscale),
       "pass the same postscale_factor on every rank"},
      {a.name, "chunks and segments", pair_text(a.chunk_bytes, a.segment_bytes),
       pair_text(b.chunk_bytes, b.segment_bytes), "let every rank use the tuned values from the same step on"},
      {a.name, "device", place_text(a), place_text(b), "keep the tensor on the same kind of device on every rank"}};
  const auto found = std::ranges::find_if(others, [](const Difference& its) { return its.left != its.right; });
  return found == std::end(others) ? std::nullopt : std::optional(*found);
}

}  // namespace

int64_t Member::count() const {
  uint64_t total = 1;  // another rank's lengths may overflow it
  for (const int64_t length : shape) {
    if (length != kAnyLength) total *= static_cast<uint64_t>(length);
  }
  return static_cast<int64_t>(total);
}

std::string Request::signature() const {
  Writer writer;
  writer.write(*this);
  writer.write(on_host());
  return writer.take();
}

Member member_of(std::string_view text, DType dtype, std::vector<int64_t> shape) {
  const size_t end = std::min(text.find('\t'), text.size());
  return {std::string(text.substr(0, end)), dtype, std::move(shape),
          std::string(text.substr(std::min(end + 1, text.size())))};
}

Compression compression_of(const std::string& text) {
  Compression compression;
  if (text.empty()) return compression;
  std::istringstream fields(text);
  fields.imbue(std::locale::classic());
  int kind = 0;
  bool encodes = false;
  fields >> kind >> compression.share >> compression.error_feedback >> compression.start >> encodes;
  if (fields.fail() || kind <= 0 || kind >= static_cast<int>(kCodecNames.size())) {
    throw std::invalid_argument("'" + text + "' is not a codec");
  }
  std::getline(fields.ignore(), compression.owner);
  compression.asked = static_cast<CodecKind>(kind);
  if (encodes) compression.kind = compression.asked;
  return compression;
}

// The family is the first field, and its name is the first field of the family.
std::string_view Request::family_of(std::string_view signature) { return Reader(signature).text(); }

Request Request::decode(std::string_view signature) {
  Reader reader(signature);
  auto request = reader.read<Request>();
  request.device = reader.read<bool>() ? kHost : kSomeGpu;
  for (const Member& member : request.members) {
    for (const int64_t length : member.shape) {
      if (length < Member::kAnyLength) throw std::runtime_error("control message: a negative length");
    }
  }
  if (!reader.done()) throw std::runtime_error("control message: bytes after the end of a request");
  return request;
}

std::string Request::problem_with_joined(const RankSet& joined) const {
  if (kind == Kind::allgather && by_elements && joined.count() > 0) {
    return joined.text() + " joined, so nobody has that part of the values. Remedy: gather before any rank joins.";
  }
  if (kind != Kind::broadcast || !joined.contains(root)) return {};
  return text_of(root) +
         " is the root of this broadcast and has joined, so it has no value to send. Remedy: broadcast from a rank "
         "that "
         "still has data, or after all ranks have joined.";
}

std::string shown(std::string_view name) {
  const size_t dot = name.find(kUnnamed);
  if (dot == std::string_view::npos) return "'" + std::string(name) + "'";
  const std::string_view number = name.substr(dot + kUnnamed.size());
  const std::string digits(number.substr(0, number.find_first_not_of("0123456789")));
  return (digits.empty() ? "a call" : "call " + digits) + " of " + std::string(name.substr(0, dot));
}

std::string_view tensor_for(const Request& request) {
  if (request.members.empty()) return {};
  const Member& first = request.members[0];
  if (!first.label.empty()) return first.label;
  return first.name.starts_with(request.name) ? std::string_view() : first.name;
}

std::string label_of(const Request& request) {
  const std::string_view tensor = tensor_for(request);
  if (tensor.empty()) return shown(request.name);
  const size_t others = request.members.size() - 1;
  return "'" + std::string(tensor) + "'" + (others > 0 ? " and " + std::to_string(others) + " more" : "");
}

bool Fail::ends(std::string_view its_name, std::string_view signature) const {
  if (its_name == name) return true;
  return !families.empty() && std::ranges::find(families, Request::family_of(signature)) != families.end();
}

Fail find_mismatch(std::string_view name, Signatures signatures) {
  // Sorted by rank, so that the text does not depend on which rank came first.
  std::ranges::sort(signatures, {}, [](const auto& its) { return its.second.first(); });
  Fail found{std::string(name), {}};
  std::set<std::string> families;
  bool family_refused = false;
  for (const auto& [signature, ranks] : signatures) {
    const Request request = Request::decode(signature);
    if (!request.family.name.empty()) families.insert(request.family.name);
    if (request.refusal.empty()) continue;
    if (found.text.empty()) found.text = ranks.text() + " cannot take part: " + request.refusal;
    family_refused |= !request.family.name.empty();
  }
  if (found.text.empty() || family_refused) found.families.assign(families.begin(), families.end());
  if (!found.text.empty()) return found;
  for (size_t i = 1; i < signatures.size(); ++i) {
    const auto& [left_signature, left_ranks] = signatures[0];
    const auto& [right_signature, right_ranks] = signatures[i];
    const auto difference = first_difference(Request::decode(left_signature), Request::decode(right_signature));
    if (!difference) continue;
    // The caller's text names the operation. If it has several tensors, add the name or the number of the tensor.
    const std::string& subject = difference->subject;
    const Request left = Request::decode(left_signature);
    const bool is_all_of_it = subject == left.name || (left.members.size() == 1 && subject == left.members[0].name);
    const bool is_named = shown(subject)[0] == '\'';
    const std::string tensor = is_all_of_it ? ""
                               : is_named   ? shown(subject)
                                            : subject.substr(std::min(subject.find('['), subject.size()));
    found.text = (tensor.empty() ? "" : "tensor " + tensor + ": ") + "the ranks disagree about its " +
                 difference->what + ": " + left_ranks.text() + (left_ranks.count() > 1 ? " have " : " has ") +
                 difference->left + ", " + right_ranks.text() + (right_ranks.count() > 1 ? " have " : " has ") +
                 difference->right + ". Remedy: " + difference->remedy + ".";
    break;
  }
  return found;
}

}  // namespace horovodish
