// Small tensors travel with the negotiation: the statement that a rank is ready carries its values, and the decision carries
// the values of all ranks. Each rank then computes the result, with no further message:
//
//     rank 1 -> rank 0   ready for 'loss', 2.0
//     rank 0 -> rank 1   execute 'loss', 1.0 2.0        both: 1.0 + 2.0
//
// This holds between hosts, for allreduces and broadcasts in host memory that the response cache knows: within a host, the plane is
// as fast. Where a rank has joined, the decision lacks its values, and the plane carries the operation out.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "negotiation/process_set_config.h"
#include "operation/operation.h"

namespace horovodish {

// How many bytes of each rank an allreduce may carry. None where the plane would not add in the order of ranks: it has the first
// result, and the later ones must have the same bits. `hosts`: see ProcessSetConfig.
size_t most_carried_bytes(const std::vector<std::vector<int>>& hosts);

class CarriedValues {
 public:
  explicit CarriedValues(const ProcessSetConfig& config);

  // What this rank's statement carries: empty if the operation is not small, or if only the root has something to say.
  std::string of(const Operation& operation) const;
  // Computes the result of a decided operation from the values that the decision carries, in the order of the tree. Returns false
  // if they are not all there. The bits are those of the plane.
  bool finish(const Operation& operation, std::string_view values) const;

 private:
  size_t bytes_of_a_rank(const Request& request) const;
  void reduce_all(const Operation& operation, std::string_view values) const;

  const size_t ranks_;
  const bool one_host_;
  const size_t most_reduced_, most_broadcast_;  // bytes of a rank
  const WorldRank own_;
  std::vector<std::vector<size_t>> places_;  // in the order of the tree, by host and rank of the host
};

}  // namespace horovodish
