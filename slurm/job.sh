# shellcheck shell=bash
# Shared code of the job scripts in this folder: `run_job CONFIG [key.sub=value ...]`.
#
# One job step runs `megatron-grpo train` on every node, which starts the engines and ranks there. On a signal
# before the time limit (SIGUSR1), the ranks save and exit with code 75; the job requeues itself and resumes
# from there. It also requeues itself after a failure, except after three restarts in a row without a new
# checkpoint, and after a user's mistake: exit code 2 of the first start. In later starts code 2 is mostly a
# file system that is temporarily unavailable.
set -euo pipefail

readonly PREEMPTED=75 FOR_THE_USER=2 MAX_STARTS=4

run_job() {
    cd "$SLURM_SUBMIT_DIR"
    # shellcheck source=slurm/env.sh
    source slurm/env.sh
    use_network
    local code=1 got_signal="" was_cancelled=""
    TRAINER="" GUARD="" RUN_DIR="" LOGS=""
    # A line per start of this job: the checkpoint at which it ended.
    ENDS=.cache/slurm_ends_$SLURM_JOB_ID
    trap 'got_signal=yes; forward USR1; guard_the_end' USR1
    trap leave_in_time USR2
    trap 'got_signal=yes; was_cancelled=yes; forward TERM' TERM
    if place_job "$@"; then
        # Not left to `set -e`, which would end the job without queueing it again.
        if mkdir -p "$LOGS" && mount_run_dir && make_token && start_trainer "$@"; then
            # A signal may have come before the trainer's shell became srun: a shell does not pass
            # signals on.
            sleep 1
            [[ -z $got_signal ]] || forward USR1
            await_trainer
        fi
    fi
    conclude
}

# Decide where everything runs; on failure `code` is the exit code. Sets NODES, PLACED, RUN_DIR, LOGS and
# FIRST_PORT.
place_job() {
    mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    PLACED=$(on_node "${NODES[0]}" megatron-grpo place "$@" --nodes "$(IFS=,; echo "${NODES[*]}")" \
        --gpus-per-node "$GPUS_PER_NODE") || {
        code=$?
        return 1
    }
    RUN_DIR=$(sed -n 's/^run_dir //p' <<<"$PLACED")
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

# Run `train` on each node; sets TRAINER to the process id of the step's srun. Rank 0 writes to the log of
# its task, every other rank and every engine to its own file.
start_trainer() {
    local node address addresses=()
    for node in "${NODES[@]}"; do
        address=$(address_of "$node") || return 1
        addresses+=("$address")
    done
    # shellcheck disable=SC2016  # each task fills in its own number and address
    step --nodes="${#NODES[@]}" --ntasks="${#NODES[@]}" --ntasks-per-node=1 --kill-on-bad-exit=0 \
        --nodelist="$(IFS=,; echo "${NODES[*]}")" --distribution=block --output="$LOGS/trainer_%t.log" \
        bash -c 'read -ra addresses <<<"$1"; exec megatron-grpo train "${@:2}" \
            --node-rank "$SLURM_PROCID" --local-addr "${addresses[SLURM_PROCID]}"' \
        train "${addresses[*]}" "$@" \
        --nnodes "${#NODES[@]}" --master-addr "${addresses[0]}" --master-port "$FIRST_PORT" \
        --gpus-per-node "$GPUS_PER_NODE" --log-dir "$LOGS" &
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

# The last message of rank 0's launcher, or of another's.
show_reason() {
    local log
    for log in "${LOGS:-/nowhere}"/trainer_*.log; do
        grep '^megatron-grpo: ' "$log" 2>/dev/null | tail -n 1 >&2 && return
    done || true
}

conclude() {
    [[ -z $GUARD ]] || kill "$GUARD" 2>/dev/null || true
    ((code == 0 || code == PREEMPTED)) || show_reason
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

# The address by which other nodes reach a node, of IPv6 only without one of IPv4. /etc/hosts may map this
# node's own name to loopback, as on Debian: then take the address of the interface. Take loopback only if
# Slurm names it as the node's address.
address_of() {
    local name found address
    name=$(scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    mapfile -t found < <(
        set +e
        getent ahostsv4 "$name" && own_address 4
        getent ahostsv6 "$name" | grep --invert-match ^::ffff && own_address 6
    )
    for address in "${found[@]%% *}"; do
        [[ ($address != 127.* && $address != ::1) || $address == "$name" ]] && break
    done
    echo "${address:?no address of node $1 is known}"
}

own_address() {
    local of=(scope global)
    [[ -z $NETWORK_INTERFACE ]] || of=(dev "${NETWORK_INTERFACE%%,*}")
    ip -"$1" -oneline address show "${of[@]}" | awk 'NR == 1 { sub("/.*", "", $4); print $4 }'
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
