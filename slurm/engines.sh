#!/usr/bin/env bash
#SBATCH --job-name=engines
#SBATCH --nodes=1
#SBATCH --exclusive
# All memory of the node: --exclusive alone allocates only the default amount.
#SBATCH --mem=0
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.log
# Engines that join a run while it trains: `sbatch --nodes=2 slurm/engines.sh RUN_DIR [key.sub=value ...]`.
# Export the same MEGATRON_GRPO_TOKEN before both jobs are submitted. Engines fill the nodes; each is a job
# step, with a file in RUN_DIR/engines while it serves. Before the time limit, and on
# `scancel --batch --signal=USR1 JOBID`, engines leave: each ends when the run has dropped it at a push.
# Engines stay when the trainer's job is queued again, and end when the run is complete.
source "${SLURM_SUBMIT_DIR:?submit this by sbatch, in the checkout}/slurm/job.sh" || exit 2

# shellcheck disable=SC2317  # a signal calls it
leave() {
    got_signal=yes
    local url name
    for url in "${urls[@]}"; do
        name=${url#http://}
        name=$RUN_DIR/engines/${name/:/_}
        mv "$name.json" "$name.leaving" 2>/dev/null || true # it may not have joined yet
    done
}

cd "$SLURM_SUBMIT_DIR"
# shellcheck source=slurm/env.sh
source slurm/env.sh
use_network
: "${MEGATRON_GRPO_TOKEN:?export the one that the job of the run was submitted with}"
export MEGATRON_GRPO_TOKEN
code=1 got_signal="" engines=() engine_logs=() urls=() RUN_DIR=${1:?RUN_DIR, the train.run_dir of the run}
arguments=("$RUN_DIR/config.yaml" "${@:2}")
mount_run_dir
place_job "${arguments[@]}" --only-engines || exit "$code"
mkdir -p "$LOGS"
trap leave USR1 TERM
start_engines "${arguments[@]}" --join || exit 1
echo "${#engines[@]} engines start, logs in $LOGS"
code=0
for number in "${!engines[@]}"; do
    # A signal to this script interrupts `wait`.
    while kill -0 "${engines[number]}" 2>/dev/null; do
        wait "${engines[number]}" || true
    done
    ended=0
    wait "${engines[number]}" || ended=$?
    # engine.sh exits with 3 for an engine that has left: its file was renamed, or the run is complete.
    if [[ -n $got_signal ]] || ((ended == 3)); then continue; fi
    code=$ended
    echo "an engine has ended: see ${engine_logs[number]}" >&2
done
exit "$code"
