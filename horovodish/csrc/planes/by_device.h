// The plane of a process set: tensors in host memory go to one plane, CUDA tensors to the other.
#pragma once

#include <memory>
#include <utility>

#include "planes/nccl/nccl.h"
#include "planes/plane.h"

namespace horovodish {

class PlaneByDevice : public Plane {
 public:
  // `nccl` uses `host`, for what its ranks must tell each other.
  PlaneByDevice(std::unique_ptr<Plane> host, std::unique_ptr<NcclPlane> nccl)
      : host_(std::move(host)), nccl_(std::move(nccl)) {}

  void start(std::shared_ptr<Operation> operation) override {
    Plane& plane = operation->request->on_host() ? *host_ : static_cast<Plane&>(*nccl_);
    plane.start(std::move(operation));
  }
  Progress advance() override {
    const Progress host = host_->advance(), nccl = nccl_->advance();
    if (host == Progress::progressed || nccl == Progress::progressed) return Progress::progressed;
    return host == Progress::pending || nccl == Progress::pending ? Progress::pending : Progress::done;
  }
  bool needs_polling() const override { return host_->needs_polling() || nccl_->needs_polling(); }
  bool needs_watching() const override { return nccl_->needs_watching(); }
  void drain(std::chrono::milliseconds limit) override { nccl_->drain(limit); }

 private:
  std::unique_ptr<Plane> host_;
  std::unique_ptr<NcclPlane> nccl_;  // ends first
};

}  // namespace horovodish
