// A kernel that copies many pieces of device memory in one launch. On an H200 a copy by the driver costs the host 5 us,
// so the 160 tensors of ResNet-50 cost 1.7 ms in and out of the fusion buffer. The driver compiles the text (PTX)
// for its GPU, so the build needs no CUDA compiler.
#pragma once

#include <array>

#include "gpu/device.h"

namespace horovodish {

// The kernel's only parameter. Parameters are limited to 4096 bytes.
using DeviceCopies = std::array<DeviceCopy, 160>;
static_assert(sizeof(DeviceCopies) == 3840);

constexpr char kCopyKernel[] = "horovodish_copy";
constexpr unsigned kCopyThreads = 256;  // of a block
constexpr unsigned kMostCopyBlocks = 256;  // for each piece
constexpr unsigned kBytesPerBlock = 16384;  // of the longest piece: 4 loads of 16 bytes for each thread

// The block's second index is the number of the piece. The block's first index and the thread's say which part of the
// piece. A thread loads as many bytes at a time as the alignment of both addresses allows; what is left at the end of
// the piece is copied byte by byte.
constexpr char kCopyKernelText[] = R"(
.version 6.5
.target sm_50
.address_size 64
.visible .entry horovodish_copy(.param .align 8 .b8 pieces[3840]) {
  .reg .pred %done, %aligned;
  .reg .b16 %half;
  .reg .b32 %block, %index, %size, %number, %a, %b, %c, %d;
  .reg .b64 %piece, %target, %source, %bytes, %thread, %threads, %at, %end, %step, %from, %to, %both;
  mov.u32 %block, %ctaid.y;
  mul.wide.u32 %at, %block, 24;
  mov.u64 %piece, pieces;
  add.u64 %piece, %piece, %at;
  ld.param.u64 %target, [%piece];
  ld.param.u64 %source, [%piece+8];
  ld.param.u64 %bytes, [%piece+16];
  cvta.to.global.u64 %target, %target;
  cvta.to.global.u64 %source, %source;
  mov.u32 %block, %ctaid.x;
  mov.u32 %size, %ntid.x;
  mov.u32 %index, %tid.x;
  mad.lo.u32 %index, %block, %size, %index;
  mov.u32 %number, %nctaid.x;
  mul.lo.u32 %number, %number, %size;
  cvt.u64.u32 %thread, %index;
  cvt.u64.u32 %threads, %number;
  or.b64 %both, %target, %source;
  and.b64 %at, %both, 15;
  setp.eq.u64 %aligned, %at, 0;
  @%aligned bra by_16;
  and.b64 %at, %both, 3;
  setp.eq.u64 %aligned, %at, 0;
  @%aligned bra by_4;
  and.b64 %at, %both, 1;
  setp.eq.u64 %aligned, %at, 0;
  @%aligned bra by_2;
  mov.u64 %end, 0;
  bra rest;
by_16:
  and.b64 %end, %bytes, -16;
  mul.lo.u64 %at, %thread, 16;
  mul.lo.u64 %step, %threads, 16;
next_16:
  setp.ge.u64 %done, %at, %end;
  @%done bra rest;
  add.u64 %from, %source, %at;
  add.u64 %to, %target, %at;
  ld.global.v4.u32 {%a, %b, %c, %d}, [%from];
  st.global.v4.u32 [%to], {%a, %b, %c, %d};
  add.u64 %at, %at, %step;
  bra next_16;
by_4:
  and.b64 %end, %bytes, -4;
  mul.lo.u64 %at, %thread, 4;
  mul.lo.u64 %step, %threads, 4;
next_4:
  setp.ge.u64 %done, %at, %end;
  @%done bra rest;
  add.u64 %from, %source, %at;
  add.u64 %to, %target, %at;
  ld.global.u32 %a, [%from];
  st.global.u32 [%to], %a;
  add.u64 %at, %at, %step;
  bra next_4;
by_2:
  and.b64 %end, %bytes, -2;
  mul.lo.u64 %at, %thread, 2;
  mul.lo.u64 %step, %threads, 2;
next_2:
  setp.ge.u64 %done, %at, %end;
  @%done bra rest;
  add.u64 %from, %source, %at;
  add.u64 %to, %target, %at;
  ld.global.u16 %half, [%from];
  st.global.u16 [%to], %half;
  add.u64 %at, %at, %step;
  bra next_2;
rest:
  add.u64 %at, %end, %thread;
next:
  setp.ge.u64 %done, %at, %bytes;
  @%done bra finished;
  add.u64 %from, %source, %at;
  add.u64 %to, %target, %at;
  ld.global.u8 %half, [%from];
  st.global.u8 [%to], %half;
  add.u64 %at, %at, %threads;
  bra next;
finished:
  ret;
}
)";

}  // namespace horovodish
