# shellcheck shell=bash
# Shared code of the job scripts in this folder: `run_job CONFIG [key.sub=value ...]`.
#
# Each engine runs as one job step over its nodes, and the trainer as one step with a torchrun per node.
# On a signal before the time limit (SIGUSR1), the trainer saves and exits with code 75; the job requeues
# itself and resumes from there. It also requeues itself after a failure, except after three restarts in a
# row without a new checkpoint, and after a user's mistake: exit code 2 of the first start. In later starts
# code 2 is mostly a file system that is temporarily unavailable.
set -euo pipefail

readonly PREEMPTED=75 FOR_THE_USER=2 MAX_STARTS=4 MAX_ENGINE_RESTARTS=3 ENGINE_PAUSE=60

run_job() {
    cd "$SLURM_SUBMIT_DIR"
    # shellcheck source=slurm/env.sh
    source slurm/env.sh
    use_network
    local code=1 got_signal="" was_cancelled="" engines=() engine_logs=() urls=()
    TRAINER="" GUARD="" RUN_DIR="" LOGS=""
    # A line per start of this job: the checkpoint at which it ended.
    ENDS=.cache/slurm_ends_$SLURM_JOB_ID
    trap 'got_signal=yes; forward USR1; guard_the_end' USR1
    trap leave_in_time USR2
    trap 'got_signal=yes; was_cancelled=yes; forward TERM' TERM
    if place_job "$@"; then
        # Not left to `set -e`, which would end the job without queueing it again.
        if mkdir -p "$LOGS" && mount_run_dir && make_token && start_engines "$@" && await_engines &&
            start_trainer "$@"; then
            # A signal may have come before the trainer's shell became srun: a shell does not pass
            # signals on.
            sleep 1
            [[ -z $got_signal ]] || forward USR1
            await_trainer
        fi
        end_engines
    fi
    conclude
}

# Decide where everything runs; on failure `code` is the exit code. Sets NODES, RUN_DIR, LOGS,
# STARTUP_TIMEOUT, RANKS_PER_NODE, TRAINERS, ENGINES and FIRST_PORT.
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

# Mount the run directory under its real path, to which a link in the checkout may lead, and under the
# path in the config: files written outside of a mount are lost with the container.
mount_run_dir() {
    local true_name
    true_name=$(realpath "$RUN_DIR") || return 1
    CONTAINER_MOUNTS+=,$true_name
    [[ $RUN_DIR != /* || $RUN_DIR == "$true_name" ]] || CONTAINER_MOUNTS+=,$true_name:$RUN_DIR
}

# Start every engine; sets the arrays urls, engines and engine_logs.
start_engines() {
    local number names gpus port node address addresses
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
        keep_engine "${engine_logs[-1]}" "$names" env CUDA_VISIBLE_DEVICES="$gpus" \
            bash slurm/engine.sh "${engine_logs[-1]}" "$(IFS=,; echo "${addresses[*]}")" \
            "$@" --port "$port" --master-port "$((FIRST_PORT + 63))" &
        engines+=($!)
    done
}

# Run an engine as a job step until SIGTERM: `keep_engine LOG NODE,... COMMAND ...`. If it ends on one of
# its nodes, Slurm ends it on all. An engine that ends while the trainer runs is started again: meanwhile
# the trainer sends requests to the other engines, and new weights to this one once it answers. The cause
# may last, such as ranks on the same GPUs that need the memory until they have trained: each further
# start waits ENGINE_PAUSE seconds longer.
keep_engine() {
    local nodes restarts engine="" code got_signal="" pause
    IFS=, read -ra nodes <<<"$2"
    trap 'got_signal=yes; kill "$engine" 2>/dev/null || true' TERM
    for ((restarts = 0; ; restarts++)); do
        step --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --nodelist="$2" \
            --kill-on-bad-exit=1 --output="$1" --open-mode=append "${@:3}" &
        engine=$!
        [[ -z $got_signal ]] || kill "$engine" 2>/dev/null || true # SIGTERM came between two engines
        code=0
        wait "$engine" || code=$?
        if [[ -n $got_signal ]]; then
            wait "$engine" || true
            exit "$code"
        elif [[ ! -e $LOGS/trainer_0.log ]] ||
            ((code == FOR_THE_USER || restarts == MAX_ENGINE_RESTARTS)); then
            exit "$code"
        fi
        pause=$((restarts * ENGINE_PAUSE))
        echo "the engine ended with exit code $code: started again in $pause s" >>"$1"
        sleep "$pause" & # not in the foreground, where a signal would wait for its end
        engine=$!
        [[ -z $got_signal ]] || kill "$engine" 2>/dev/null || true
        wait "$engine" || true
        [[ -z $got_signal ]] || exit "$code"
    done
}

# Send a signal to the trainer, if it has started.
forward() {
    [[ -z $TRAINER ]] || kill -"$1" "$TRAINER" 2>/dev/null || true
}

# Requeue the job (SIGUSR2) a minute before the time limit, or halfway if less than two minutes are left:
# Slurm kills a longer save, and nothing would requeue the job. The next start removes the partial
# checkpoint and resumes from the one before it.
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
    echo "the save did not end before the time limit: send the signal earlier, such as by" \
        "sbatch --signal=B:USR1@1800" >&2
    code=$PREEMPTED
    conclude
    exit
}

# Wait until all engines answer; if they do not in time, return 1 with the exit code in `code`.
await_engines() {
    local number end=$((SECONDS + STARTUP_TIMEOUT))
    for number in "${!urls[@]}"; do
        until curl --silent --fail --max-time 5 --output /dev/null --noproxy '*' \
            "${urls[number]}/health"; do
            if [[ -n $got_signal ]]; then
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

# Check all engines each time: one that hangs must not hide the end of another.
all_engines_run() {
    local number
    for number in "${!engines[@]}"; do
        kill -0 "${engines[number]}" 2>/dev/null && continue
        wait "${engines[number]}" || code=$?
        echo "an engine has ended: see ${engine_logs[number]}" >&2
        return 1
    done
}

# Start one torchrun per node; sets TRAINER to the process id of the step's srun. Rank 0 writes to the
# log of its task, every other rank to its own file in a folder next to it.
start_trainer() {
    local address nodes
    address=$(address_of "${TRAINERS[0]}") || return 1
    nodes=${#TRAINERS[@]}
    # shellcheck disable=SC2016  # each task fills in its own number
    step --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
        --kill-on-bad-exit=0 \
        --nodelist="$(IFS=,; echo "${TRAINERS[*]}")" --output="$LOGS/trainer_%t.log" \
        bash -c 'exec python -m megatron_grpo.launch.torchrun --node-rank="$SLURM_PROCID" \
            --log-dir="$1/host_$SLURM_PROCID" "${@:2}"' \
        torchrun "$LOGS" \
        --nnodes="$nodes" --nproc-per-node="$RANKS_PER_NODE" \
        --master-addr="$address" --master-port="$FIRST_PORT" --rdzv-id="$SLURM_JOB_ID" \
        -m megatron_grpo train "$@" "rollout.base_urls=[$(IFS=,; echo "${urls[*]}")]" &
    TRAINER=$!
}

# A signal to this script interrupts `wait`, so wait until the step itself has ended.
await_trainer() {
    while kill -0 "$TRAINER" 2>/dev/null; do
        wait "$TRAINER" || true
    done
    code=0
    wait "$TRAINER" || code=$?
    # A process that received the signal before it had a handler has died of it.
    [[ -z $got_signal ]] || ((code != 128 + $(kill -l USR1))) || code=$PREEMPTED
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
        requeue
    else
        rm -f "$ENDS"
        exit "$code"
    fi
}

# Slurm's controller may be away for minutes, such as while it restarts.
requeue() {
    local tries=0
    until scontrol requeue "$SLURM_JOB_ID"; do
        ((++tries < 30)) || exit "$code"
        sleep 10
    done
}

is_mistake() {
    ((code == FOR_THE_USER && ${SLURM_RESTART_COUNT:-0} == 0))
}

# False if the last MAX_STARTS starts ended at the same checkpoint. A start that failed before the run
# directory was known counts as ending where the start before it did.
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

# Become a job step, in the container or the virtual environment, that shares cores and GPUs of its nodes
# with other steps. Without --cpus-per-task it has all cores of each node. Call it in a subshell, which
# becomes srun and passes signals on.
step() {
    local container=()
    if [[ -n $CONTAINER_IMAGE ]]; then
        container=(--container-image="$CONTAINER_IMAGE" --container-mounts="$CONTAINER_MOUNTS"
            --container-workdir="$PWD")
        # Trainer and engines both use the image's package: `python -m` would import the checkout's.
        export PYTHONSAFEPATH=1
    else
        [[ -x $VENV/bin/megatron-grpo ]] || {
            echo "$VENV has no megatron-grpo: set VENV or CONTAINER_IMAGE in slurm/env.sh" >&2
            exit "$FOR_THE_USER"
        }
        PATH=$VENV/bin:$PATH
    fi
    export SLURM_CPU_BIND=none
    exec srun --overlap --mem=0 "${container[@]}" "$@"
}

# The first of a job's 64 ports on each node, by the job id, so that jobs on one node differ. All are
# below the kernel's ephemeral ports.
first_port() {
    echo $((20000 + SLURM_JOB_ID % 199 * 64))
}

# The address by which other nodes reach a node. /etc/hosts may map this node's own name to loopback, as
# on Debian: then take the address of the interface. Take loopback only if Slurm names it as the node's
# address.
address_of() {
    local name found address
    name=$(scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    mapfile -t found < <(getent ahostsv4 "$name" && own_address)
    for address in "${found[@]%% *}"; do
        [[ $address == 127.* && $address != "$name" ]] || break
    done
    echo "${address:?no IPv4 address of node $1 is known}"
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

# The token of trainer and engines, only in the environment. Each start makes its own, unless the job was
# submitted with one, for engines of other jobs (slurm/engines.sh).
make_token() {
    : "${MEGATRON_GRPO_TOKEN:=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
    export MEGATRON_GRPO_TOKEN
}
