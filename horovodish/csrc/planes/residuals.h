// What this rank's codes have left out so far: errors that it adds to what it encodes next, by the names of tensors, since the
// buckets in which these travel change. The reports of what it has encoded are kept here, too.
//
// Whatever a rank encodes at an element, a contribution or a sum, it keeps the error there, in units of the sum before the final
// scaling. So it does not matter which rank sums up an element next time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "operation/operation.h"

namespace horovodish {

// Of one process set. All ranks count the same uses, so they agree on what is encoded.
class Residuals {
 public:
  // A decided operation begins: counts a use of its tensors. If codes are to travel, gives the operation its seed and the errors.
  // A tensor that comes with another shape or dtype begins anew.
  void begin_use(Operation& operation);
  // Whether the operation must wait for choose(): it is to be encoded by a codec that the ranks have not found out yet.
  bool needs_choice(const Operation& operation) const;
  void choose(CodecKind kind) { chosen_ = kind; }

  struct Report {
    std::string owner, name;  // see Compression and Member
    CodecKind kind;
    double share;
    CodeFigures figures;
  };
  // Of every tensor that was encoded, by owner and name. Calls of allreduce that keep no errors are one tensor without a name.
  std::vector<Report> reports() const;

 private:
  struct Entry {
    DType dtype;
    std::vector<int64_t> shape;
    uint64_t uses = 0;
    std::shared_ptr<float> errors = nullptr;
    Compression compression = {};
    CodeFigures figures = {};
  };

  std::map<std::pair<std::string, std::string>, Entry> entries_;  // by the owner and the name of the tensor
  std::map<std::pair<CodecKind, double>, CodeFigures> calls_;
  std::optional<CodecKind> chosen_;  // for CodecKind::automatic
};

}  // namespace horovodish
