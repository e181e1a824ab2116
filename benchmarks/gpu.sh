#!/bin/sh
# Everything that there is to test and to measure on this machine's GPU, each step within its time, in about 20 minutes:
#
#     benchmarks/gpu.sh FOLDER [PYTHON [STEP...]]      # steps: machine tests one-rank thresholds two-ranks; all if none
#
# PYTHON, python3 if it is not given, has horovodish installed, its test extra, torch for CUDA and JAX.
# One file for each step goes to FOLDER. A step that fails does not keep the others from running; the exit status is the number
# of those that failed.
set -u
folder=$1 python=${2:-python3}
shift $(($# < 2 ? $# : 2))
wanted=" $* "
cd "$(dirname "$0")/.." && mkdir -p "$folder" || exit 99
failed=0

step() { # NAME SECONDS COMMAND...
    name=$1 seconds=$2
    shift 2
    case $wanted in "  " | *" $name "*) ;; *) return ;; esac
    echo "== $name: $*"
    timeout -k 10 "$seconds" "$@" >"$folder/$name.txt" 2>&1 </dev/null
    status=$?
    [ $status -eq 0 ] || failed=$((failed + 1))
    tail -n 12 "$folder/$name.txt"
    echo "== $name: exit status $status"
}

two() { # NAME SECONDS ARGUMENTS...: two ranks on one GPU
    name=$1 seconds=$2
    shift 2
    step "$name" "$seconds" env HOROVODISH_TEST_SHARED_GPU=1 "$python" -m horovodish.launcher run -np 2 \
        "$python" benchmarks/gpu.py "$@"
}

step machine 60 sh -c "nvidia-smi; $python -m horovodish.launcher check"
# Only files that have such tests: others may import frameworks that are not installed here.
tests=$(grep -rl --include='test_*.py' '^@pytest.mark.gpu' tests)
# shellcheck disable=SC2086
step tests 420 env HOROVODISH_TEST_GPU=1 "$python" -m pytest -q -m gpu --durations=0 $tests
step one-rank 300 "$python" benchmarks/gpu.py --timeline "$folder/timeline"
step thresholds 180 "$python" benchmarks/gpu.py --thresholds 4 16 64 128 --rounds 3
two two-ranks 300 --batch-scale 0.5 --rounds 5
exit $failed
