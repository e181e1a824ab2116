// How collectives run within TensorFlow: as asynchronous kernels, or, where a kernel's callback cannot be kept, in three
// parts: one that submits and gives a ticket, one that looks whether the ticket's work is done, and one that takes the
// results. None of them waits for another rank for longer than a moment.
#pragma once

#include "tensorflow/work.h"

namespace horovodish::tensorflow {

void run(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* callback);

void submit_for_ticket(void* kernel, TF_OpKernelContext* context);
void look_at_ticket(void* kernel, TF_OpKernelContext* context);
void take_for_ticket(void* kernel, TF_OpKernelContext* context);

void fail(TF_OpKernelContext* context, TF_Code code, const std::string& message);

}  // namespace horovodish::tensorflow
