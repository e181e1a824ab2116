// How collectives run within TensorFlow: as asynchronous kernels, or, if a kernel's callback cannot be kept, in three
// parts. One part submits and gives a ticket, one looks whether the ticket's work is done, and one takes the results.
// No part waits for another rank for longer than a moment.
#pragma once

#include "tensorflow/work.h"

namespace horovodish::tensorflow {

void run(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* callback);

void submit_for_ticket(void* kernel, TF_OpKernelContext* context);
void look_at_ticket(void* kernel, TF_OpKernelContext* context);
void take_for_ticket(void* kernel, TF_OpKernelContext* context);

void fail(TF_OpKernelContext* context, TF_Code code, const std::string& message);

}  // namespace horovodish::tensorflow
