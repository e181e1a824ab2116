// The plane of a process set of one rank: nothing moves, only scaling and copies remain.
#pragma once

#include "planes/plane.h"

namespace horovodish {

class SoloPlane : public Plane {
 public:
  explicit SoloPlane(OnComplete on_complete) : on_complete_(std::move(on_complete)) {}
  void start(std::shared_ptr<Operation> operation) override;
  Progress advance() override { return Progress::done; }

 private:
  static void copy_and_scale(Operation& operation);

  OnComplete on_complete_;
};

}  // namespace horovodish
