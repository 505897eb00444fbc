# shellcheck shell=bash
# What the job scripts in this folder have in common: `run_job CONFIG [key.sub=value ...]`.
#
# The engines run as one job step each, and the trainer as one step with a torchrun per node. A
# signal before the time limit (SIGUSR1) has the trainer save and leave with exit code 75; then the
# job queues itself again, and goes on from there. So it does after a failure, but not after three
# restarts in a row that brought no new checkpoint, nor after a mistake that somebody has to mend: one
# that the first start tells. What has started before has no such mistake, and most of what looks like
# one by night is a file system that is away.
set -euo pipefail

readonly PREEMPTED=75 FOR_THE_USER=2 MAX_STARTS=4

run_job() {
    cd "$SLURM_SUBMIT_DIR"
    # shellcheck source=slurm/env.sh
    source slurm/env.sh
    use_network
    local code=1 was_told="" was_cancelled="" engines=() urls=()
    TRAINER="" GUARD="" RUN_DIR="" LOGS=""
    # At which checkpoint each start of this job has ended.
    ENDS=.cache/slurm_ends_$SLURM_JOB_ID
    trap 'was_told=yes; forward USR1; guard_the_end' USR1
    trap leave_in_time USR2
    trap 'was_told=yes; was_cancelled=yes; forward TERM' TERM
    if place_job "$@"; then
        mkdir -p "$LOGS"
        mount_run_dir
        make_token
        start_engines "$@"
        if await_engines; then
            start_trainer "$@"
            # A signal that came before there was anybody to forward it to, or before the shell that
            # becomes srun had become it: that keeps signals to itself.
            sleep 1
            [[ -z $was_told ]] || forward USR1
            await_trainer
        fi
        end_engines
    fi
    conclude
}

# Where everything runs; else `code` says why not. Sets RUN_DIR, LOGS, STARTUP_TIMEOUT,
# RANKS_PER_NODE, TRAINERS and ENGINES.
place_job() {
    mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    local placed
    placed=$(on_node "${NODES[0]}" megatron-grpo place "$@" --nodes "$(IFS=,; echo "${NODES[*]}")" \
        --gpus-per-node "$GPUS_PER_NODE") || {
        code=$?
        return 1
    }
    RUN_DIR=$(sed -n 's/^run_dir //p' <<<"$placed")
    STARTUP_TIMEOUT=$(awk '$1 == "startup_timeout" { print $2 }' <<<"$placed")
    RANKS_PER_NODE=$(awk '$1 == "ranks_per_node" { print $2 }' <<<"$placed")
    mapfile -t TRAINERS < <(awk '$1 == "trainer" { print $2 }' <<<"$placed")
    mapfile -t ENGINES < <(awk '$1 == "engine" { print $2, $3 }' <<<"$placed")
    LOGS=$RUN_DIR/logs/slurm_${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}
    FIRST_PORT=$(first_port)
}

# What is written where nothing is mounted is lost with the container. By the name that the config
# has for it, and by its true one: a link in the checkout leads there.
mount_run_dir() {
    local true_name
    true_name=$(realpath "$RUN_DIR")
    CONTAINER_MOUNTS+=,$true_name
    [[ $RUN_DIR != /* || $RUN_DIR == "$true_name" ]] || CONTAINER_MOUNTS+=,$true_name:$RUN_DIR
}

start_engines() {
    local number node gpus port address
    for number in "${!ENGINES[@]}"; do
        read -r node gpus <<<"${ENGINES[number]}"
        address=$(address_of "$node")
        port=$((FIRST_PORT + 1 + number))
        # Within the step: Slurm gives every task a CUDA_VISIBLE_DEVICES of its own, all GPUs.
        on_node "$node" --output="$LOGS/engine_$number.log" env CUDA_VISIBLE_DEVICES="$gpus" \
            bash slurm/engine.sh "$LOGS" "$@" --host "$address" --port "$port" &
        engines+=($!)
        urls+=("http://$address:$port")
    done
}

# To the trainer, if it has begun.
forward() {
    [[ -z $TRAINER ]] || kill -"$1" "$TRAINER" 2>/dev/null || true
}

# A save that lasts beyond the time limit is cut there, and nobody would queue the job again: have
# this script do so (SIGUSR2) a minute before, or halfway where less than two are left. What is
# written until then is removed by the next start, which goes on from the checkpoint before it.
guard_the_end() {
    local end left
    [[ -z $GUARD ]] || return 0
    end=$(SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e) || return 0
    [[ $end =~ ^[0-9]+$ ]] || return 0
    left=$((end - $(date +%s)))
    (
        sleep $((left < 120 ? left / 2 : left - 60)) &
        trap 'kill $!' TERM
        wait $! && kill -USR2 $$
    ) &
    GUARD=$!
}

leave_in_time() {
    echo "the save was not done before the time limit: let the signal come earlier, such as by" \
        "sbatch --signal=B:USR1@1800" >&2
    code=$PREEMPTED
    conclude
    exit
}

# Whether all answer in time; else `code` says why not.
await_engines() {
    local number end=$((SECONDS + STARTUP_TIMEOUT))
    for number in "${!urls[@]}"; do
        until curl --silent --fail --max-time 5 --output /dev/null --noproxy '*' \
            "${urls[number]}/health"; do
            if [[ -n $was_told ]]; then
                code=$PREEMPTED
                return 1
            elif ((SECONDS >= end)); then
                echo "engine $number did not answer within $STARTUP_TIMEOUT s" \
                    "(rollout.startup_timeout): see $LOGS/engine_$number.log" >&2
                return 1
            fi
            all_engines_run || return 1
            sleep 1
        done
    done
}

# Each time of all: one that hangs must not hide another's end.
all_engines_run() {
    local number
    for number in "${!engines[@]}"; do
        kill -0 "${engines[number]}" 2>/dev/null && continue
        wait "${engines[number]}" || code=$?
        echo "engine $number has ended: see $LOGS/engine_$number.log" >&2
        return 1
    done
}

# One torchrun per node; sets TRAINER to the process that stands for the step. Rank 0 writes to the
# log of its task, every other rank to a file of its own below.
start_trainer() {
    local address nodes others
    address=$(address_of "${TRAINERS[0]}")
    nodes=${#TRAINERS[@]}
    others=$(seq -s, -f '%g:3' 1 $((RANKS_PER_NODE - 1)))
    # shellcheck disable=SC2016  # each task fills in its own number
    MEGATRON_GRPO_OWN_LOGS=1 step --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
        --kill-on-bad-exit=0 \
        --nodelist="$(IFS=,; echo "${TRAINERS[*]}")" --output="$LOGS/trainer_%t.log" \
        bash -c 'redirects=3; ((SLURM_PROCID > 0)) || redirects=$1; exec python \
            -m megatron_grpo.launch.torchrun --rdzv-backend=fabric --rdzv-conf="rank=$SLURM_PROCID" \
            --redirects="$redirects" --log-dir="$2/host_$SLURM_PROCID" "${@:3}"' \
        torchrun "${others:-0}" "$LOGS" \
        --rdzv-endpoint="$address:$FIRST_PORT" --rdzv-id="$SLURM_JOB_ID" --nnodes="$nodes" \
        --nproc-per-node="$RANKS_PER_NODE" \
        -m megatron_grpo.cli train "$@" "rollout.base_urls=[$(IFS=,; echo "${urls[*]}")]" &
    TRAINER=$!
}

# A signal to this script ends `wait`; the exit code is that of the step's own end.
await_trainer() {
    while kill -0 "$TRAINER" 2>/dev/null; do
        wait "$TRAINER" || true
    done
    code=0
    wait "$TRAINER" || code=$?
    # What the signal has met before it was able to take it has died of it.
    [[ -z $was_told ]] || ((code != 128 + $(kill -l USR1))) || code=$PREEMPTED
}

end_engines() {
    kill "${engines[@]}" 2>/dev/null || true
    local engine
    for engine in "${engines[@]}"; do
        wait "$engine" || true
    done
}

conclude() {
    [[ -z $GUARD ]] || kill "$GUARD" 2>/dev/null || true
    ((code == 0 || code == PREEMPTED)) || [[ -z $LOGS ]] ||
        grep --no-filename '^megatron-grpo: ' "$LOGS"/*.log | tail -n 1 >&2 || true
    if ((code != 0)) && ! is_mistake && [[ -z $was_cancelled ]] && may_start_again; then
        ((code == PREEMPTED)) || echo "exit code $code: queued again${LOGS:+, see $LOGS}" >&2
        scontrol requeue "$SLURM_JOB_ID"
    else
        rm -f "$ENDS"
        exit "$code"
    fi
}

is_mistake() {
    ((code == FOR_THE_USER && ${SLURM_RESTART_COUNT:-0} == 0))
}

# Not where the last of so many starts ended where the first did. One that did not get as far as to
# know the run directory ended where the one before it did.
may_start_again() {
    local last same
    mkdir -p "${ENDS%/*}"
    [[ ${SLURM_RESTART_COUNT:-0} != 0 ]] || rm -f "$ENDS"
    last=$(cat "${RUN_DIR:-/nowhere}/checkpoints/LATEST" 2>/dev/null ||
        tail -n 1 "$ENDS" 2>/dev/null || echo "no checkpoint")
    echo "$last" >>"$ENDS" || return 1
    same=$(tail -n "$MAX_STARTS" "$ENDS" | grep --count --line-regexp --fixed-strings -e "$last")
    ((same == MAX_STARTS)) || return 0
    echo "stopped: $MAX_STARTS starts in a row ended at the same place ($last)," \
        "the last with exit code $code${LOGS:+: see $LOGS}" >&2
    return 1
}

# One task on one node: `on_node NODE [--srun-option ...] COMMAND ...`
on_node() {
    step --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"
}

# Become a job step, in the container or the virtual environment, that shares its nodes' cores and
# GPUs with other steps. For subshells: their process is srun then, and passes signals on.
step() {
    local container=()
    if [[ -n $CONTAINER_IMAGE ]]; then
        container=(--container-image="$CONTAINER_IMAGE" --container-mounts="$CONTAINER_MOUNTS"
            --container-workdir="$PWD")
        # Trainer and engines are both those of the image: `python -m` would take the checkout's.
        export PYTHONSAFEPATH=1
    else
        PATH=$VENV/bin:$PATH
    fi
    export SLURM_CPU_BIND=none
    exec srun --overlap --cpus-per-task="$SLURM_CPUS_ON_NODE" --mem=0 \
        "${container[@]}" "$@"
}

# Of a job's 64: jobs that share a node differ in their number. Below those that the kernel gives
# away by itself.
first_port() {
    echo $((20000 + SLURM_JOB_ID % 199 * 64))
}

# By which other nodes reach one. In its own /etc/hosts the name of this node may stand for loopback,
# as Debian has it: then the address is that of the interface. Loopback it is where Slurm says so.
address_of() {
    local name found address
    name=$(scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    mapfile -t found < <(getent ahostsv4 "$name" && own_address)
    for address in "${found[@]%% *}"; do
        [[ $address == 127.* && $address != "$name" ]] || break
    done
    echo "${address:?none is known of node $1}"
}

own_address() {
    local of=(scope global)
    [[ -z $NETWORK_INTERFACE ]] || of=(dev "${NETWORK_INTERFACE%%,*}")
    ip -4 -oneline address show "${of[@]}" | awk 'NR == 1 { sub("/.*", "", $4); print $4 }'
}

use_network() {
    [[ -n $NETWORK_INTERFACE ]] || return 0
    export NCCL_SOCKET_IFNAME=$NETWORK_INTERFACE GLOO_SOCKET_IFNAME=$NETWORK_INTERFACE
}

# The secret that trainer and engines of this start share; the environment alone has it.
make_token() {
    MEGATRON_GRPO_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export MEGATRON_GRPO_TOKEN
}
