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

# Start every engine as a job step over its nodes; sets the arrays urls, engines and engine_logs.
start_engines() {
    local number names gpus port node address addresses ENGINES
    mapfile -t ENGINES < <(awk '$1 == "engine" { print $2, $3 }' <<<"$PLACED")
    for number in "${!ENGINES[@]}"; do
        read -r names gpus <<<"${ENGINES[number]}"
        addresses=()
        for node in ${names//,/ }; do
            address=$(address_of "$node") || return 1
            addresses+=("$address")
        done
        # A port of its own: no other engine on these nodes has the same first GPU.
        port=$((FIRST_PORT + 1 + ${gpus%%,*}))
        urls+=("http://${addresses[0]}:$port")
        engine_logs+=("$LOGS/engine_$number.log")
        # All engines can use the same rendezvous port: one over several nodes has them alone. `env`
        # within the step, since Slurm sets CUDA_VISIBLE_DEVICES of every task to all GPUs.
        step --nodes="${#addresses[@]}" --ntasks="${#addresses[@]}" --ntasks-per-node=1 \
            --nodelist="$names" --kill-on-bad-exit=1 --output="${engine_logs[-1]}" --open-mode=append \
            env CUDA_VISIBLE_DEVICES="$gpus" \
            bash slurm/engine.sh "${engine_logs[-1]}" "$(IFS=,; echo "${addresses[*]}")" \
            "$@" --port "$port" --master-port "$((FIRST_PORT + 63))" &
        engines+=($!)
    done
}

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
