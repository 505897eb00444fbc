#!/usr/bin/env bash
# The engine of a job step, `engine.sh LOGS ARGUMENTS_OF_SERVE ...`: started again where it dies while
# the trainer runs. The trainer sends its requests to the others meanwhile, and new weights to this one
# when it answers again. Job scripts run this; it is not for sbatch.
set -uo pipefail

readonly FOR_THE_USER=2 MAX_RESTARTS=3

was_told=""
trap 'was_told=yes; kill "$engine"' TERM

# Of the 107 characters that a socket's path may have, vLLM's names take 37, and the folder's own 15.
: "${TMPDIR:=/tmp}"
((${#TMPDIR} <= 55)) || TMPDIR=/tmp
export TMPDIR

for ((restarts = 0; ; restarts++)); do
    folder=$(mktemp --directory)
    # A process group of each: what an engine leaves behind ends with it, and frees its GPUs. So do
    # the sockets and files that it leaves in a temporary folder of its own.
    TMPDIR=$folder setsid megatron-grpo serve "${@:2}" &
    engine=$!
    wait "$engine"
    code=$?
    [[ -z $was_told ]] || wait "$engine"
    # Python's resource trackers unlink the shared memory of the others once these have ended.
    kill -TERM -- "-$engine" 2>/dev/null
    for _ in {1..20}; do
        kill -0 -- "-$engine" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL -- "-$engine" 2>/dev/null
    rm -rf "$folder"
    if [[ -n $was_told || ! -e $1/trainer_0.log ]] ||
        ((code == FOR_THE_USER || restarts == MAX_RESTARTS)); then
        exit "$code"
    fi
    echo "the engine ended with exit code $code: started again" >&2
done
