// One execution of a collective: its memory, its submission and its results.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine_interface.h"
#include "tensorflow/tensors.h"

namespace horovodish::tensorflow {

// Set once by Python, before any kernel runs.
void connect(const EngineInterface* interface);
const EngineInterface& engine();

// The address of a tensor. It is never null, even without elements: null would stand for a joined rank.
std::byte* memory_of(const TensorPtr& tensor);

// The TensorFlow code nearest to an error of ours. The message begins with the error's class.
TF_Code code_of(ErrorKind kind);
std::string message_of(const Error& error);

class Work {
 public:
  // The place of results of known size. `outputs`: outputs of the running operation, which take an input's memory if
  // nobody else needs it. `held`: they wait for the operation that takes them.
  enum class Results { outputs, held };

  // Reads the inputs of the running operation. `call`: the part that all its executions share.
  Work(const Submission& call, TF_OpKernelContext* context, Results results, Status& status);

  // Call it once. `owner` owns this work.
  void submit(std::shared_ptr<void> owner, Then then) {
    engine().submit(std::move(submission_), std::move(owner), std::move(then));
  }

  // Gives `context` the results that are not its outputs yet.
  void finish(TF_OpKernelContext* context, const Handle& handle, Status& status) const;

 private:
  struct Tensors {
    TensorPtr source;  // null if `target` has taken its memory
    TensorPtr target;
  };

  void read_name(TF_OpKernelContext* context, std::vector<std::string>& names, Status& status);
  void read_splits(TF_OpKernelContext* context, int index, Status& status);
  Tensors read_tensors(TF_OpKernelContext* context, int index, Status& status) const;
  void set_rows(TF_OpKernelContext* context, const Handle& handle, Status& status) const;

  const Kind kind_;
  const bool any_rows_;
  const Results results_;
  Submission submission_;
  std::vector<Tensors> tensors_;  // by member
};

}  // namespace horovodish::tensorflow
