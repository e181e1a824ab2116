// The library that tf.load_op_library() opens: it registers the operations and their kernels when it is loaded.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "tensorflow/callback.h"
#include "tensorflow/executions.h"
#include "tensorflow/shapes.h"
#include "tensorflow/work.h"

namespace horovodish::tensorflow {

namespace {

using InferShapes = void (*)(TF_ShapeInferenceContext*, TF_Status*);

constexpr const char* kCpu = "CPU";

[[noreturn]] void give_up(const std::string& name, const char* why) {
  std::fprintf(stderr, "horovodish: TensorFlow refused the operation %s: %s\n", name.c_str(), why);
  std::abort();
}

void define(const std::string& name, const std::vector<const char*>& inputs, const std::vector<const char*>& outputs,
            const std::vector<const char*>& attributes, InferShapes infer) {
  TF_OpDefinitionBuilder* builder = TF_NewOpDefinitionBuilder(name.c_str());
  for (const char* input : inputs) TF_OpDefinitionBuilderAddInput(builder, input);
  for (const char* output : outputs) TF_OpDefinitionBuilderAddOutput(builder, output);
  for (const char* attribute : attributes) TF_OpDefinitionBuilderAddAttr(builder, attribute);
  // Other ranks wait for the operation, so TensorFlow must not drop it, merge it with another one or compute it
  // beforehand.
  TF_OpDefinitionBuilderSetIsStateful(builder, true);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, infer);
  Status status;
  TF_RegisterOpDefinition(builder, status.get());
  if (!status.ok()) give_up(name, TF_Message(status.get()));
}

void register_kernel(const std::string& name, TF_KernelBuilder* builder) {
  Status status;
  TF_RegisterKernelBuilder(name.c_str(), builder, status.get());
  if (!status.ok()) give_up(name, TF_Message(status.get()));
}

// -- kernels of the collectives

int64_t integer(TF_OpKernelConstruction* construction, const char* name, Status& status) {
  int64_t value = 0;
  if (status.ok()) TF_OpKernelConstruction_GetAttrInt64(construction, name, &value, status.get());
  return value;
}

std::string text(TF_OpKernelConstruction* construction, const char* name, Status& status) {
  int32_t list = 0, size = 0;
  if (status.ok()) TF_OpKernelConstruction_GetAttrSize(construction, name, &list, &size, status.get());
  std::string value(static_cast<size_t>(size), '\0');
  if (status.ok()) TF_OpKernelConstruction_GetAttrString(construction, name, value.data(), value.size(), status.get());
  return value;
}

template <Kind kind>
void* create(TF_OpKernelConstruction* construction) {
  Status status;
  auto submission = std::make_unique<Submission>();
  Request& request = submission->request;
  request.kind = kind;
  const std::string set = text(construction, "process_set", status);
  char* ranks = nullptr;
  submission->process_set = static_cast<int>(std::strtol(set.c_str(), &ranks, 10));
  submission->ranks = *ranks == '\0' ? ranks : ranks + 1;
  if (kind == Kind::broadcast) request.root = WorldRank(static_cast<int>(integer(construction, "root_rank", status)));
  if (kind == Kind::allreduce || kind == Kind::reducescatter) {
    request.op = static_cast<ReduceOp>(integer(construction, "op", status));
    const std::string factors = text(construction, "factors", status);
    char* rest = nullptr;
    request.prescale = std::strtod(factors.c_str(), &rest);
    request.postscale = std::strtod(rest, nullptr);
  }
  if (kind == Kind::allreduce) submission->codec = text(construction, "codec", status);
  if (!status.ok()) TF_OpKernelConstruction_Failure(construction, status.get());
  return submission.release();
}

void destroy(void* kernel) { delete static_cast<Submission*>(kernel); }

template <Kind kind>
void define_collective(const std::string& name, std::vector<const char*> inputs,
                       const std::vector<const char*>& outputs, std::vector<const char*> attributes, InferShapes infer,
                       InferShapes infer_take) {
  attributes.push_back("process_set: string");  // "0" is all ranks, "2 0,1" number 2 of the ranks 0 and 1
  inputs.insert(inputs.begin(), "tensor_name: uint8");
  define(name, inputs, outputs, attributes, infer);
  register_kernel(name, TF_NewAsyncKernelBuilder(name.c_str(), kCpu, &create<kind>, &run, &destroy));

  const std::string submit = name + "Submit", take = name + "Take";
  define(submit, inputs, {"ticket: int64"}, attributes, &shapes::scalars<1>);
  register_kernel(submit, TF_NewKernelBuilder(submit.c_str(), kCpu, &create<kind>, &submit_for_ticket, &destroy));
  inputs.push_back("ticket: int64");
  define(take, inputs, outputs, attributes, infer_take);
  register_kernel(take, TF_NewKernelBuilder(take.c_str(), kCpu, nullptr, &take_for_ticket, nullptr));
}

// -- kernels of the other operations

// Tells whether callbacks can be kept.
void probe(void*, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* callback) {
  Status status;
  const bool keepable = looks_like_ours(callback);
  set_output(context, 0, TF_BOOL, {}, &keepable, sizeof keepable, status);
  if (!status.ok()) TF_OpKernelContext_Failure(context, status.get());
  if (keepable) {
    const Callback kept(callback);
    kept();
  } else {
    TF_RunAsyncOpKernelDoneCallback(callback);
  }
}

void* read_process_set(TF_OpKernelConstruction* construction) {
  Status status;
  auto process_set = std::make_unique<int>(static_cast<int>(integer(construction, "process_set", status)));
  if (!status.ok()) TF_OpKernelConstruction_Failure(construction, status.get());
  return process_set.release();
}

void destroy_process_set(void* kernel) { delete static_cast<int*>(kernel); }

void place(void* kernel, TF_OpKernelContext* context) {
  const RankInGroup place = engine().place(*static_cast<const int*>(kernel));
  const std::array<int32_t, 3> values{place.rank, place.size, engine().horovods_gradients() ? 1 : 0};
  Status status;
  for (size_t i = 0; i < values.size(); ++i) {
    set_output(context, i, TF_INT32, {}, &values[i], sizeof values[i], status);
  }
  if (!status.ok()) TF_OpKernelContext_Failure(context, status.get());
}

// Allocates memory like the tensors' memory, into which the engine writes their reduction. Also gives the addresses of
// the tensors and, after all of these, of their results.
void make_room(void*, TF_OpKernelContext* context) {
  const auto tensors = static_cast<size_t>(TF_NumInputs(context)) - 1;
  std::vector<uintptr_t> addresses(2 * tensors);
  Status status;
  for (size_t i = 0; i < tensors && status.ok(); ++i) {
    const TensorPtr like = input(context, static_cast<int>(i) + 1, status);
    if (!status.ok()) break;
    const std::vector<int64_t> dims = dims_of(like.get());
    const TensorPtr room(TF_AllocateOutput(context, static_cast<int>(i), TF_TensorType(like.get()), dims.data(),
                                           static_cast<int>(dims.size()), TF_TensorByteSize(like.get()), status.get()));
    if (!status.ok()) break;
    addresses[i] = reinterpret_cast<uintptr_t>(memory_of(like));
    addresses[tensors + i] = reinterpret_cast<uintptr_t>(memory_of(room));
  }
  set_output(context, tensors, TF_INT64, {static_cast<int64_t>(addresses.size())}, addresses.data(),
             addresses.size() * sizeof(int64_t), status);
  if (!status.ok()) TF_OpKernelContext_Failure(context, status.get());
}

#define HOROVODISH_NUMBERS "uint8, int8, int16, int32, int64, half, bfloat16, float, double"
#define HOROVODISH_ANY "bool, uint16, uint32, uint64, " HOROVODISH_NUMBERS

void register_everything() {
  using namespace shapes;
  const char* const numbers = "T: list({" HOROVODISH_NUMBERS "}) >= 1";
  const char* const any = "T: list({" HOROVODISH_ANY "}) >= 1";
  const char* const any_one = "T: {" HOROVODISH_ANY "}";
  const char* const codec = "codec: string = ''";  // graphs in files may have none
  define_collective<Kind::allreduce>("HorovodishAllreduce", {"tensors: T"}, {"reduced: T"},
                                     {numbers, "op: int", "factors: string", codec}, &like_tensors<0>,
                                     &like_tensors<1>);
  define_collective<Kind::broadcast>("HorovodishBroadcast", {"tensor: T"}, {"sent: T"}, {any_one, "root_rank: int"},
                                     &like_tensors<0>, &like_tensors<1>);
  define_collective<Kind::allgather>("HorovodishAllgather", {"tensors: T"}, {"gathered: T", "rows: N * int64"},
                                     {any, "N: int >= 1"}, &gathered<0>, &gathered<1>);
  define_collective<Kind::alltoall>("HorovodishAlltoall", {"tensor: T", "splits: int64"},
                                    {"received: T", "received_splits: int64"}, {any_one}, &gathered<1>, &gathered<2>);
  define_collective<Kind::reducescatter>("HorovodishReducescatter", {"tensors: T"}, {"scattered: T"},
                                         {numbers, "op: int", "factors: string"}, &scattered<0>, &scattered<1>);
  define_collective<Kind::join>("HorovodishJoin", {}, {"last_joined: int32"}, {}, &scalars<1>, &scalars<1>);
  define_collective<Kind::barrier>("HorovodishBarrier", {}, {}, {}, &like_tensors<0>, &like_tensors<1>);

  const char* const room = "HorovodishAllreduceRoom";
  define(room, {"tensor_name: uint8", "tensors: T"}, {"reduced: T", "addresses: int64"},
         {numbers, "op: int", "factors: string", codec, "process_set: string"}, &like_tensors<0>);
  register_kernel(room, TF_NewKernelBuilder(room, kCpu, nullptr, &make_room, nullptr));

  define("HorovodishLook", {"ticket: int64"}, {"settled: bool"}, {}, &scalars<1>);
  register_kernel("HorovodishLook", TF_NewKernelBuilder("HorovodishLook", kCpu, nullptr, &look_at_ticket, nullptr));
  define("HorovodishProbe", {}, {"keepable: bool"}, {}, &scalars<1>);
  register_kernel("HorovodishProbe", TF_NewAsyncKernelBuilder("HorovodishProbe", kCpu, nullptr, &probe, nullptr));
  define("HorovodishPlace", {}, {"rank: int32", "size: int32", "horovods_gradients: int32"}, {"process_set: int"},
         &scalars<3>);
  register_kernel("HorovodishPlace",
                  TF_NewKernelBuilder("HorovodishPlace", kCpu, &read_process_set, &place, &destroy_process_set));
}

const bool registered = (register_everything(), true);

}  // namespace

}  // namespace horovodish::tensorflow

extern "C" {

// `engine` is the address that horovodish._native gives.
__attribute__((visibility("default"))) void horovodish_connect(const void* engine) {
  horovodish::tensorflow::connect(static_cast<const horovodish::EngineInterface*>(engine));
}

__attribute__((visibility("default"))) int horovodish_looks_like_a_callback(const void* memory) {
  return horovodish::tensorflow::looks_like_ours(memory) ? 1 : 0;
}
}
