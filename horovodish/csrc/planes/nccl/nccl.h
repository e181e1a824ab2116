// The plane of CUDA tensors: NCCL on the engine's stream of this rank's GPU. It hands host tensors to the host's plane.
//
// An operation passes these stages; only the first in the queue moves, and all of a rank's process sets share one order
// of launches (launch_order.h):
//     bootstrap   once for the plane: the ranks tell each other their GPUs, and the first one NCCL's id, over the host's
//                 plane. All ranks see the same, and come to the same result. Once more for the first operation without
//                 joined ranks, if a rank had joined before: it may have had no GPU.
//     count       where the number of rows differs by rank: they tell it each other, likewise
//     connect     once for the plane: the communicator is made
//     launch      packing, the call, and when NCCL has launched that, unpacking
// An operation is complete when launched. Its event comes when the GPU has done it. No stage waits: NCCL's calls return
// at once, and the plane asks later whether they have ended. An operation whose event does not come before the plane
// ends is lost (launched_operations.h).
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "negotiation/process_set_config.h"
#include "planes/nccl/launch_order.h"
#include "planes/nccl/launched_operations.h"
#include "planes/nccl/nccl_communicator.h"
#include "planes/nccl/nccl_launch.h"
#include "planes/plane.h"

namespace horovodish {

class NcclPlane : public Plane {
 public:
  // `config`, `order` and `launched` outlive the plane.
  NcclPlane(const ProcessSetConfig& config, const EngineOptions& options, std::unique_ptr<Plane> host,
            LaunchOrder& order, LaunchedOperations& launched, OnEnd on_end);
  // Waits briefly for launched operations, then aborts them.
  ~NcclPlane() override;

  void start(std::shared_ptr<Operation> operation) override;
  bool advance() override;
  bool needs_polling() const override { return host_->needs_polling() || !items_.empty(); }
  std::vector<Residuals::Report> code_reports() const override { return host_->code_reports(); }
  const Launched* oldest_launched() const override { return launched_.empty() ? nullptr : &launched_.front(); }
  void drain(std::chrono::milliseconds limit) override;
  void about_to_end(const Error& why) noexcept override;

 private:
  // The data that the ranks exchange in the bootstrap.
  struct Bootstrap {
    std::string problem, host, gpu, gpu_id;
    int64_t ordinal = -1;
    int nccl_version = 0;
    bool shares = false;
    std::string id;  // of the communicator, from the first rank

    static auto fields(auto& its) {
      return std::tie(its.problem, its.host, its.gpu, its.gpu_id, its.ordinal, its.nccl_version, its.shares, its.id);
    }
  };
  struct Validation {
    bool any_joined = false;  // a rank had joined when this was asked for
    bool known = false;
    std::string refusal;  // why this set cannot use NCCL; empty if it can
    abi::NcclUniqueId id{};
  };
  struct Item {
    std::shared_ptr<Operation> operation;
    std::shared_ptr<const Validation> validation;
    NcclLaunch::Rows rows;  // once the rows are known
    std::unique_ptr<NcclLaunch> launch;  // null until launched
  };

  void order(const Operation& operation);
  void exchange_bootstrap(const Operation& operation);
  void validate(const std::vector<std::string>& told, Validation& validation) const;
  std::string refusal(const std::vector<Bootstrap>& ranks) const;
  void count(const std::shared_ptr<Item>& item);
  void exchange_texts(const std::string& name, const std::string& text,
                      std::function<void(const std::vector<std::string>&)> then);
  bool advance_first();
  bool launch(Item& item);
  void unpack(Item& item);
  void copy_alone(Operation& operation);
  void end(const Error* error);
  bool is_local_copy(const Request& request) const;
  void launched(Operation& operation, Device& device);
  void look_at_launched();
  void end_communicator(Operation* launching) noexcept;
  void lose_launched() noexcept;

  const ProcessSetConfig& config_;
  const bool alone_;  // a rank that is alone uses NCCL, even if a copy is enough
  const bool shared_gpu_;  // several ranks may use one GPU
  const std::unique_ptr<Plane> host_;
  LaunchOrder& order_;
  LaunchedOperations& launched_operations_;
  const OnEnd on_end_;

  Device* device_ = nullptr;  // null until the first operation, and if there is no device
  std::shared_ptr<Validation> validation_;  // for operations from now on; null until the first one
  std::unique_ptr<NcclCommunicator> communicator_;
  std::deque<std::shared_ptr<Item>> items_;
  std::deque<Launched> launched_;  // in the order of the stream, until their events have come
  Error end_{ErrorKind::rank_lost, "its process set was removed"};  // why the plane ends
};

}  // namespace horovodish
