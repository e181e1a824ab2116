#include "engine/bucket_plan.h"

#include <algorithm>
#include <stdexcept>

#include "gpu/device.h"
#include "memory/clock.h"

namespace horovodish {

BucketPlan::BucketPlan(Engine& engine, const Request& shared, const std::vector<std::pair<Member, size_t>>& members,
                       const std::vector<int>& devices, int process_set, const std::vector<std::vector<int64_t>>& ends,
                       const std::vector<Compression>& compressions)
    : engine_(engine), process_set_(process_set) {
  for (size_t index = 0; index < members.size(); ++index) {
    const auto& [member, bucket] = members[index];
    if (bucket >= buckets_.size()) buckets_.resize(bucket + 1);
    Bucket& its = buckets_[bucket];
    if (!its.request) {
      its.request = std::make_shared<Request>(shared);
      its.request->name = shared.name + ", bucket " + std::to_string(bucket);
      its.request->device = devices.at(devices.size() == 1 ? 0 : bucket);
      if (!ends.empty()) its.request->ends = ends.at(bucket);
      if (!compressions.empty()) its.request->compression = compressions.at(bucket);
    }
    positions_.push_back({bucket, its.request->members.size()});
    its.request->members.push_back(member);
    its.indices.push_back(index);
  }
  for (Bucket& bucket : buckets_) {
    if (!bucket.request) throw std::invalid_argument("plan '" + shared.name + "' has a bucket without tensors");
    bucket.signature = std::make_shared<const std::string>(bucket.request->signature());
    begin(bucket);
  }
  open_buckets_ = buckets_.size();
}

void BucketPlan::begin(Bucket& bucket) {
  const size_t size = bucket.request->members.size();
  bucket.buffers.assign(size, {});
  bucket.stated.assign(size, false);
  bucket.absent_members.clear();
  bucket.streams.clear();
  bucket.missing = size;
  bucket.operation.reset();
  bucket.owners.reset();
}

void BucketPlan::submit(size_t index, const void* source, void* target, uintptr_t stream, bool absent) {
  const Position position = positions_.at(index);
  std::lock_guard lock(mutex_);
  Bucket& bucket = buckets_[position.bucket];
  if (bucket.stated[position.member]) {
    throw std::logic_error("gradient of '" + bucket.request->members[position.member].name +
                           "' was submitted twice in one step");
  }
  bucket.stated[position.member] = true;
  bucket.buffers[position.member] = {static_cast<const std::byte*>(source), static_cast<std::byte*>(target)};
  if (absent) bucket.absent_members.push_back(position.member);
  const bool on_host = bucket.request->on_host();
  auto& streams = bucket.streams;
  if (!on_host && std::ranges::find(streams, stream) == streams.end()) streams.push_back(stream);
  if (--bucket.missing > 0) return;

  auto operation = operation_of(bucket.request, bucket.buffers, process_set_, engine_.make_handle(), bucket.signature);
  operation->absent = make_mask(bucket.absent_members, bucket.buffers.size());
  bucket.owners = std::make_shared<std::vector<std::shared_ptr<void>>>();
  operation->memory = bucket.owners;
  // The event is recorded now, so it comes after all earlier work on the stream.
  for (const uintptr_t each : streams) operation->ready.push_back(Device::get(bucket.request->device).record(each));
  --open_buckets_;
  // After its last bucket, the step can only wait.
  engine_.enqueue(operation, open_buckets_ == 0);
  bucket.operation = std::move(operation);
}

void BucketPlan::flush() const {
  for (const Bucket& bucket : buckets_) {
    for (size_t i = 0; i < bucket.stated.size(); ++i) {
      if (!bucket.stated[i]) {
        throw std::logic_error("gradient of '" + bucket.request->members[i].name +
                               "' was neither submitted nor declared absent in this step");
      }
    }
  }
}

bool BucketPlan::arrived(size_t index, uintptr_t stream) {
  std::lock_guard lock(mutex_);
  const Bucket& bucket = buckets_.at(index);
  if (!bucket.settled() || bucket.operation->handle->error() != nullptr) return false;
  order_after(bucket, stream);
  return true;
}

bool BucketPlan::settled() const { return std::ranges::all_of(buckets_, &Bucket::settled); }

bool BucketPlan::wait(std::chrono::nanoseconds limit) {
  const auto deadline = Clock::now() + limit;
  for (const Bucket& bucket : buckets_) {
    if (!bucket.operation) throw std::logic_error("'" + bucket.request->name + "' has not been submitted in this step");
    if (!engine_.wait(*bucket.operation->handle, deadline - Clock::now())) return false;
  }
  return true;
}

const Error* BucketPlan::error() const {
  for (const Bucket& bucket : buckets_) {
    const Error* const error = bucket.operation ? bucket.operation->handle->error() : nullptr;
    if (error != nullptr) return error;
  }
  return nullptr;
}

void BucketPlan::keep(const std::shared_ptr<void>& owner) {
  std::lock_guard lock(mutex_);
  for (Bucket& bucket : buckets_) {
    if (bucket.operation) bucket.owners->push_back(owner);
  }
}

void BucketPlan::order_after(uintptr_t stream) const {
  for (const Bucket& bucket : buckets_) order_after(bucket, stream);
}

void BucketPlan::order_after(const Bucket& bucket, uintptr_t stream) {
  DeviceEvent* const event = bucket.operation ? bucket.operation->handle->event() : nullptr;
  if (event == nullptr) return;
  event->order_after(stream);
  for (const uintptr_t each : bucket.streams) {
    if (each != stream) event->order_after(each);
  }
}

std::vector<size_t> BucketPlan::absent_everywhere() const {
  std::vector<size_t> result;
  for (const Bucket& bucket : buckets_) {
    if (!bucket.settled() || bucket.operation->absent.empty()) continue;
    for (size_t i = 0; i < bucket.indices.size(); ++i) {
      if (mask_bit(bucket.operation->absent, i)) result.push_back(bucket.indices[i]);
    }
  }
  return result;
}

bool BucketPlan::any_joined() const {
  return std::ranges::any_of(buckets_,
                             [](const Bucket& bucket) { return bucket.operation && bucket.operation->any_joined; });
}

void BucketPlan::reset() {
  std::lock_guard lock(mutex_);
  for (Bucket& bucket : buckets_) begin(bucket);
  open_buckets_ = buckets_.size();
}

}  // namespace horovodish
