#include "planes/solo.h"

#include "arithmetic/copy_bytes.h"
#include "planes/fusion.h"

namespace horovodish {

void SoloPlane::start(std::shared_ptr<Operation> operation) {
  copy_and_scale(*operation);
  on_complete_(operation);
}

void SoloPlane::copy_and_scale(Operation& operation) {
  const Request& request = *operation.request;
  const Scaling scaling = operation.scaling();
  if (request.members.empty()) return;
  const Trace::Span span(operation.trace, request.kind == Kind::allreduce ? Phase::reduce : Phase::unpack);
  for (size_t i = 0; i < request.members.size(); ++i) {
    const Member& member = request.members[i];
    const Buffer& buffer = operation.buffers[i];
    const size_t count = static_cast<size_t>(member.count());
    if (request.any_rows()) {
      Handle::Output& output = allocate_rows(operation, i, buffer.rows);
      if (output.bytes > 0) copy_bytes(output.data.get(), buffer.source, output.bytes);
    } else if (scaling.prescale != 1.0 || scaling.postscale != 1.0) {
      const void* source = buffer.source;
      reduce(member.dtype, ReduceOp::sum, buffer.target, &source, 1, count, scaling);  // of one value all ops are alike
    } else if (buffer.target != buffer.source && count > 0) {
      copy_bytes(buffer.target, buffer.source, count * bytes_of(member.dtype));
    }
  }
}

}  // namespace horovodish
