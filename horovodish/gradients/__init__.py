"""How the gradients of a wrapped optimizer travel. The optimizers and tapes of the shims call this folder.

options      what users ask for, in one table
plan         cuts gradients into buckets, and reduces gradients that are all there
at_once      reduces these buckets outside of programs; layouts: what any rank has of each gradient
parameters   compares the parameters of ranks without blocking a step
autotune     tries other sizes of buckets between steps
windows      which optimizers hold gradients that no step has used; `horovodish.elastic` asks
lone_steps   warns where no optimizer is wrapped
"""
