#!/usr/bin/env bash
# An engine on one of its nodes, `engine.sh LOG ADDRESS_OF_NODE_0,... ARGUMENTS_OF_SERVE ...`, as the task
# of the engine's job step there. If the engine ends, so does the step on the other nodes: the exit code
# is not 0 then. Job scripts run this; do not submit it with sbatch.
set -uo pipefail

IFS=, read -ra addresses <<<"$2"
((SLURM_NODEID == 0)) || exec >>"${1%.log}_node_$SLURM_NODEID.log" 2>&1

was_told=""
trap 'was_told=yes; kill "$engine"' TERM

# A socket's path may have 107 characters: vLLM's names take 37, and the folder's own name 15.
: "${TMPDIR:=/tmp}"
((${#TMPDIR} <= 55)) || TMPDIR=/tmp
export TMPDIR
folder=$(mktemp --directory)

# The engine has its own process group, so that the processes it leaves behind end with it and free its
# GPUs, and its own temporary folder, so that its sockets and files are removed.
TMPDIR=$folder setsid megatron-grpo serve "${@:3}" --host "${addresses[SLURM_NODEID]}" \
    --nnodes "${#addresses[@]}" --node-rank "$SLURM_NODEID" --master-addr "${addresses[0]}" &
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
# A node that was told to end must not hide the exit code of the one that ended by itself.
[[ -z $was_told ]] || exit 0
# One that has joined a run ends with 0 when it has left it, or the run is complete: 3 tells engines.sh.
exit $((code ? code : 3))
