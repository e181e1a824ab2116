// A plane made of two: each operation goes to one of them, and both advance.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "planes/plane.h"

namespace horovodish {

class Router : public Plane {
 public:
  using Chooses = std::function<bool(const Request&)>;

  // `second` takes what it `chooses`, and may use `first`.
  Router(std::unique_ptr<Plane> first, std::unique_ptr<Plane> second, Chooses chooses)
      : first_(std::move(first)), second_(std::move(second)), chooses_(std::move(chooses)) {}

  void start(std::shared_ptr<Operation> operation) override {
    Plane& plane = chooses_(*operation->request) ? *second_ : *first_;
    plane.start(std::move(operation));
  }
  Progress advance() override {
    const Progress first = first_->advance(), second = second_->advance();
    return std::max(first, second);
  }
  bool needs_polling() const override { return first_->needs_polling() || second_->needs_polling(); }
  bool needs_watching() const override { return first_->needs_watching() || second_->needs_watching(); }
  std::optional<Launched> oldest_launched() const override {
    const auto first = first_->oldest_launched();
    return first ? first : second_->oldest_launched();
  }
  void drain(std::chrono::milliseconds limit) override {
    first_->drain(limit);
    second_->drain(limit);
  }
  void about_to_end(const Error& why) noexcept override {
    first_->about_to_end(why);
    second_->about_to_end(why);
  }

 private:
  std::unique_ptr<Plane> first_, second_;  // the second ends first
  const Chooses chooses_;
};

}  // namespace horovodish
