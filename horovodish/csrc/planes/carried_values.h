// Small tensors travel with the negotiation: the statement that a rank is ready carries its values, and the decision carries
// the values of all ranks. Each rank then computes the result, with no further message:
//
//     rank 1 -> rank 0   ready for 'loss', 2.0
//     rank 0 -> rank 1   execute 'loss', 1.0 2.0        both: 1.0 + 2.0
//
// Only allreduces and broadcasts between hosts, in host memory, whose requests the response cache knows. Within a host,
// the plane is as fast. If a rank has joined, the decision lacks its values, and the plane carries out the operation.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "negotiation/process_set_config.h"
#include "operation/operation.h"

namespace horovodish {

// How many bytes of each rank an allreduce may carry. 0 if the plane would not add in the order of ranks: the plane
// computes the first result, and later results must have the same bits. `hosts`: see ProcessSetConfig.
size_t most_carried_bytes(const std::vector<std::vector<int>>& hosts);

class CarriedValues {
 public:
  explicit CarriedValues(const ProcessSetConfig& config);

  // The values in this rank's statement. Empty if the operation is not small, or if only the root has values.
  std::string of(const Operation& operation) const;
  // Computes the result of a decided operation from the values in the decision, in the order of the tree. Returns false
  // if values are missing. The result has the same bits as the plane's.
  bool finish(const Operation& operation, std::string_view values) const;

 private:
  size_t bytes_of_a_rank(const Request& request) const;
  void reduce_all(const Operation& operation, std::string_view values) const;

  const size_t ranks_;
  const bool one_host_;
  const size_t most_reduced_, most_broadcast_;  // bytes of each rank
  const WorldRank own_;
  std::vector<std::vector<size_t>> places_;  // in the order of the tree, by host and rank of the host
};

}  // namespace horovodish
