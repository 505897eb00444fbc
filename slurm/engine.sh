#!/usr/bin/env bash
# Runs an engine's processes on one of its nodes, as a task of the engine's job step:
# `engine.sh LOG ADDRESS_OF_NODE_0,... ARGUMENTS_OF_SERVE ...`. If the engine ends, the exit code is not 0,
# by which Slurm ends the step on the other nodes. Job scripts run this; do not submit it with sbatch.
set -uo pipefail

IFS=, read -ra addresses <<<"$2"
((SLURM_NODEID == 0)) || exec >>"${1%.log}_node_$SLURM_NODEID.log" 2>&1

got_signal=""
trap 'got_signal=yes; kill "$engine"' TERM

# The path of a socket may have 107 characters: 37 are vLLM's names, 15 the folder's own name.
: "${TMPDIR:=/tmp}"
((${#TMPDIR} <= 55)) || TMPDIR=/tmp
export TMPDIR
folder=$(mktemp --directory)

# An own process group: processes that the engine leaves behind are killed, and free its GPUs. An own
# temporary folder: its sockets and files are removed.
TMPDIR=$folder setsid megatron-grpo serve "${@:3}" --host "${addresses[SLURM_NODEID]}" \
    --nnodes "${#addresses[@]}" --node-rank "$SLURM_NODEID" --master-addr "${addresses[0]}" &
engine=$!
wait "$engine"
code=$?
[[ -z $got_signal ]] || wait "$engine"
# Python's resource trackers unlink the shared memory of the other processes once these have ended.
kill -TERM -- "-$engine" 2>/dev/null
for _ in {1..20}; do
    kill -0 -- "-$engine" 2>/dev/null || break
    sleep 0.1
done
kill -KILL -- "-$engine" 2>/dev/null
rm -rf "$folder"
# A node that Slurm ends must not hide the exit code of the node that ended by itself.
[[ -z $got_signal ]] || exit 0
# An engine that joined a run exits with 0 when it leaves, or when the run is complete: 3 for engines.sh,
# since any 0 would leave the step running on the other nodes.
exit $((code ? code : 3))
