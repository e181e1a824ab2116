// The errors that this rank's codes have left out so far. The rank adds them to the next values that it encodes. They
// are kept by the names of tensors, because a tensor's bucket may change. This file also keeps the reports about
// encoded tensors.
//
// When a rank encodes an element, of a contribution or of a sum, it keeps the error there, in units of the sum before
// the final scaling. So any host may sum up an element next time. In another bucket, another rank of the host may
// encode the element. Then this rank adds its error to the value that it gives that rank:
//
//     a rank of 2 + 2     bucket {a}: encodes 0 to 49 of a         bucket {b, a}: encodes b
//                         keeps the errors of 0 to 49 of a         gives away its values of a with these errors
//
// Entries that are not used for long are dropped: the optimizer that used them may be gone.
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

// The residuals of one process set. All ranks count the same uses, so they agree on what is encoded.
class Residuals {
 public:
  // A decided operation begins: counts a use of its tensors. If codes are to travel, gives the operation its seed and
  // the errors. A tensor with a new shape or dtype begins anew. So does a tensor that was not used while another one
  // was used kUnused times or more; after twice as many uses it is dropped.
  void begin_use(Operation& operation);
  // Returns whether the operation must wait for choose(): its codec is automatic, and the ranks have not chosen yet.
  bool needs_choice(const Operation& operation) const;
  void choose(CodecKind kind) { chosen_ = kind; }

  struct Report {
    std::string owner, name;  // see Compression and Member
    CodecKind kind;
    double share;
    CodeFigures figures;
  };
  // Of every encoded tensor, by owner and name. Calls of allreduce that keep no errors count as one tensor without a
  // name.
  std::vector<Report> reports() const;

 private:
  // Far more steps than between two uses of one optimizer's tensors, and soon over if another optimizer trains.
  static constexpr uint64_t kUnused = 1000;

  struct Entry {
    DType dtype = DType::float32;
    std::vector<int64_t> shape = {};
    std::string label = {};  // see Member
    uint64_t uses = 0;
    uint64_t recent_uses = 0;  // since unused entries were last dropped
    std::shared_ptr<float> errors = nullptr;
    size_t bucket = 0;  // digest of the bucket that last used the errors
    Compression compression = {};
    // An operation that is under way shares it, as it shares the errors.
    std::shared_ptr<CodeFigures> figures = std::make_shared<CodeFigures>();
  };

  void drop_unused();

  std::map<std::pair<std::string, std::string>, Entry> entries_;  // by the owner and the name of the tensor
  std::map<std::pair<CodecKind, double>, std::shared_ptr<CodeFigures>> calls_;
  std::optional<CodecKind> chosen_;  // for CodecKind::automatic
};

}  // namespace horovodish
