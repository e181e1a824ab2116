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
  using TakesSecond = std::function<bool(const Request&)>;

  // `second` takes what it `takes_second` says, and may use `first`.
  Router(std::unique_ptr<Plane> first, std::unique_ptr<Plane> second, TakesSecond takes_second)
      : first_(std::move(first)), second_(std::move(second)), takes_second_(std::move(takes_second)) {}

  void start(std::shared_ptr<Operation> operation) override {
    Plane& plane = takes_second_(*operation->request) ? *second_ : *first_;
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
  const TakesSecond takes_second_;
};

}  // namespace horovodish
