"""Mistakes that end the job. A docstring has what the last lines must say, a pattern in each line."""

import contextlib
import os
import signal
import sys
import time

import numpy as np
from each import make

import horovodish as hvd

if not sys.argv[1].startswith("init_"):
    hvd.init()
    rank = hvd.rank()
loss = np.ones(2)


def exception():
    r"""rank 0 failed because a rank was lost: .* rank 1 raised KeyError: 'train'
    rank 1 on \S+ raised:
    alone.py", line \d+, in exception
    rank 1 on \S+ failed with exit status 1: KeyError: 'train'$"""
    hvd.barrier()
    if rank == 1:
        _ = {}["train"]
    hvd.barrier()


def exit_with_a_status():
    r"""rank 0 on \S+ raised:
    alone.py", line \d+, in exit_with_a_status
    failed on rank 0: rank 1 called sys.exit\(3\) in alone.py:\d+$
    rank 1 on \S+ failed with exit status 3: it called sys.exit\(3\) in alone.py:\d+; rank 0 waits in alone.py:\d+$"""
    if rank == 1:
        sys.exit(3)
    hvd.barrier()


def exit_of_a_shell():
    r"""failed on rank 0: rank 1 called exit\(3\) in alone.py:\d+$
    rank 1 on \S+ failed with exit status 3: it called exit\(3\) in alone.py:\d+; rank 0 waits in alone.py:\d+$"""
    if rank == 1:
        exit(3)
    hvd.barrier()


def exit_before_the_others():
    r"""failed on rank 0: rank 1 has ended its script by sys.exit\(\) in alone.py:\d+$
    Remedy: if the ranks have different numbers of batches
    rank 0 on \S+ failed with exit status 1: .* by sys.exit\(\) in alone.py:\d+; rank 0 waits in alone.py:\d+$"""
    if rank == 1:
        sys.exit()
    hvd.barrier()


def misspelt_name():
    r"""AttributeError: module 'horovodish' has no attribute 'Summ'. Did you mean: 'Sum'\?$
    rank \d on \S+ failed with exit status 1: AttributeError: .*. Did you mean: 'Sum'\?$"""
    hvd.allreduce(loss, op=hvd.Summ)


def exit_without_cleaning_up():
    r"""rank 0 failed because a rank was lost: .*: rank 1 has died
    rank 1 on \S+ ended with exit status 0 while other ranks needed it.* Did it call os._exit\(\)\?$"""
    if rank == 1:
        os._exit(0)
    hvd.barrier()


def exit_with_a_status_without_cleaning_up():
    r"""rank 1 has died: it was killed, it crashed or it called os._exit\(\)
    rank 1 on \S+ failed with exit status 3, without ending its script. Did it call os._exit\(\)\?$"""
    if rank == 1:
        os._exit(3)
    hvd.barrier()


def crash():
    r"""^Fatal Python error: Segmentation fault$
    alone.py", line \d+ in crash$
    rank 1 on \S+ was killed by signal 11 \(SIGSEGV\)$"""
    if rank == 1:
        signal.raise_signal(signal.SIGSEGV)
    hvd.barrier()


def killed_for_memory():
    r"""rank 0 failed because a rank was lost: .*: rank 1 has died
    rank 1 on \S+ was killed by signal 9 \(SIGKILL\); a machine that runs out of memory does that$"""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()


def killed_without_min_np():
    r"""rank 0 failed because a rank was lost: LaunchError: .* without --min-np: rank 1 has died
    rank 1 on \S+ was killed by signal 9 \(SIGKILL\)
    ; the job ends because it was started without --min-np: horovodish run -np 2 --min-np 1 \.\.\.$"""

    @hvd.elastic.run
    def train(state):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()

    train(hvd.elastic.ObjectState())


def collective_under_rank_0():
    r"""alone.py", line \d+, in collective_under_rank_0
    allreduce 'loss' failed on rank 0: rank 1 has ended its script$
    Remedy: .* If a collective is under `if rank == 0:` or the like, call it on every rank
    rank 0 on \S+ failed with exit status 1: .*'loss'.*; rank 0 waits in alone.py:\d+$"""
    if rank == 0:
        hvd.allreduce(loss, name="loss")


def different_collectives():
    r"""alone.py", line \d+, in different_collectives
    'loss' was submitted by rank 0 but not by rank 1; call 1 of allreduce was submitted by rank 1 but not by rank 0$
    Remedy: call the same .* is called under `if rank == 0:`
    rank \d on \S+ failed with exit status 1: StallError: .* every rank waits, .*
    ; rank 0 waits in alone.py:\d+, rank 1 waits in alone.py:\d+$"""
    if rank == 0:
        hvd.allreduce(loss, name="loss")
    hvd.allreduce(loss)


def hanging_data_loader():
    r"""alone.py", line \d+, in hanging_data_loader
    StallError: allreduce 'loss' failed on rank 0: .*'loss' was submitted by rank 0 but not by rank 1\.$
    rank 1 has not submitted anything yet$
    rank 0 on \S+ failed with exit status 1"""
    if rank == 1:
        time.sleep(600)
    hvd.allreduce(loss, name="loss")


def join_forgotten_by_one():
    r"""alone.py", line \d+, in join_forgotten_by_one
    rank \d on \S+ failed with exit status 1"""
    for _ in range(3 - rank):
        hvd.allreduce(loss, name="loss")
    if rank == 1:
        hvd.join()


def name_used_twice():
    r"""alone.py", line \d+, in name_used_twice
    DuplicateNameError: allreduce 'loss' on rank \d: an operation of that name has not completed yet. Remedy: sync
    rank \d on \S+ failed with exit status 1: DuplicateNameError"""
    time.sleep(hvd.rank())  # the first loss of rank 0 cannot be complete before its second one
    handles = [hvd.allreduce_async(loss, name="loss") for _ in range(2)]
    for handle in handles:
        hvd.synchronize(handle)


def after_shutdown():
    r"""ranks? (0-1|0|1) on \S+ raised:
    alone.py", line \d+, in after_shutdown
    rank \d on \S+ failed with exit status 1: NotInitializedError: .* call hvd.init\(\) before allreduce\(\)$"""
    hvd.shutdown()
    hvd.allreduce(loss)


def set_not_added():
    r"""ranks? (0-1|0|1) on \S+ raised:
    alone.py", line \d+, in set_not_added
    hvd.allreduce\(loss, process_set=hvd.ProcessSet\(\[0, 1\]\)\)$
    ValueError: the process set of ranks \[0, 1\] is not in use: add it with hvd.add_process_set
    rank \d on \S+ failed with exit status 1: ValueError: the process set"""
    hvd.allreduce(loss, process_set=hvd.ProcessSet([0, 1]))


def used_in_a_worker():
    r"""ForkedProcessError: a process that was forked from rank \d cannot use its engine. Call horovodish only in the
    ^horovodish: rank \d on \S+ failed with exit status 1: ForkedProcessError"""
    from multiprocessing import get_context

    with get_context("fork").Pool(1) as pool:
        pool.map(hvd.allreduce, [loss])


def caught_error_of_a_lost_rank():
    r"""this rank ends as if all were well, because its script has caught: .*barrier failed on rank 0:
    rank 1 has ended its script$"""
    if rank == 0:
        with contextlib.suppress(Exception):
            hvd.barrier()


def init_forgotten():
    r"""ranks? (0-1|0|1) on \S+ raised:
    alone.py", line \d+, in init_forgotten
    rank \d on \S+ failed with exit status 1: NotInitializedError: .* call hvd.init\(\) before allreduce\(\)$"""
    hvd.allreduce(loss)


def init_on_rank_0_alone():
    r"""^horovodish: rank 1 on \S+ ended with exit status 0 without init\(\), where rank 0 waits for it.
    Remedy: let every rank call init\(\), or none"""
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "0":
        hvd.init()


def init_after_an_import_of_horovod():
    r"""hint: the script is written for Horovod: start it with `horovodish run --as-horovod`
    rank \d on \S+ failed with exit status 1: ModuleNotFoundError: No module named 'horovod'$"""
    import horovod.torch

    horovod.torch.init()


make(globals())
