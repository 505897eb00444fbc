#!/usr/bin/env bash
# The engine of a job step, `engine.sh LOGS ARGUMENTS_OF_SERVE ...`: restarted if it dies while the
# trainer runs. Meanwhile the trainer sends its requests to the other engines, and new weights to this
# one when it answers again. Job scripts run this; do not submit it with sbatch.
set -uo pipefail

readonly FOR_THE_USER=2 MAX_RESTARTS=3

was_told=""
trap 'was_told=yes; kill "$engine"' TERM

# A socket's path may have 107 characters: vLLM's names take 37, and the folder's own name 15.
: "${TMPDIR:=/tmp}"
((${#TMPDIR} <= 55)) || TMPDIR=/tmp
export TMPDIR

for ((restarts = 0; ; restarts++)); do
    folder=$(mktemp --directory)
    # Each engine has its own process group, so that the processes it leaves behind end with it and free
    # its GPUs (one over several nodes kills its own), and its own temporary folder, so that its sockets
    # and files are removed.
    TMPDIR=$folder setsid megatron-grpo serve "${@:2}" &
    engine=$!
    wait "$engine"
    code=$?
    [[ -z $was_told ]] || wait "$engine"
    # Python's resource trackers unlink the shared memory of the other processes once these have ended.
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
