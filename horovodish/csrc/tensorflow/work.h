// One execution of a collective: its memory, its submission and its results.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "arithmetic/types.h"
#include "c_interface.h"
#include "tensorflow/tensors.h"

namespace horovodish::tensorflow {

// What a kernel knows from the graph.
struct Attributes {
  c_interface::Submission call;  // what all executions have in common
  std::string ranks;  // of the process set, separated by commas
  std::string codec;  // see compression_of()

  // The engine allocates the results: no rank knows their size beforehand.
  bool any_rows() const { return call.kind == Kind::allgather || call.kind == Kind::alltoall; }
};

// Set once by Python, before any kernel runs.
void connect(const c_interface::Table* table);
const c_interface::Table& engine();

// Where a tensor is. It is never null, also of a tensor without elements: null would stand for a rank that has joined.
void* memory_of(const TensorPtr& tensor);

// The code of TensorFlow's that comes nearest to an error of ours, whose class begins the message.
TF_Code code_of(const std::string& error_class);
std::string message_of(const c_interface::Outcome& outcome);

class Work {
 public:
  // Where results lie whose size is known: they become outputs of the operation that is running, taking an input's memory
  // if nobody else needs that, or wait for the operation that will take them.
  enum class Results { outputs, held };

  // Reads the inputs of the operation that is running.
  Work(const Attributes& attributes, TF_OpKernelContext* context, Results results, Status& status);

  // `owner` owns this work. `then` gets a pointer to it.
  void submit(void (*then)(void* owner, const c_interface::Outcome*), std::shared_ptr<void> owner) const;

  // Gives `context` the results that are not its outputs yet.
  void finish(TF_OpKernelContext* context, const c_interface::Outcome& outcome, Status& status);

 private:
  struct Member {
    TensorPtr source;  // null where `target` has taken its memory
    TensorPtr target;
    std::vector<int64_t> dims;
  };

  void read_name(TF_OpKernelContext* context, Status& status);
  void read_splits(TF_OpKernelContext* context, int index, Status& status);
  Member read_member(TF_OpKernelContext* context, int index, Status& status) const;
  void set_rows(TF_OpKernelContext* context, const c_interface::Outcome& outcome, Status& status) const;

  const Attributes attributes_;
  const Results results_;
  const int64_t step_;
  std::string family_, name_, compared_;
  std::vector<std::string> names_;  // of the members, each followed by its label; empty where they have none
  std::vector<Member> members_;
  std::vector<int64_t> splits_;
};

}  // namespace horovodish::tensorflow
