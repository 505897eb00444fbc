# shellcheck shell=bash disable=SC2034
# Settings that differ between sites. Before submitting a job:   source slurm/env.sh
# Every job reads this file again. Variables that are already set in the environment are kept.

# sbatch reads these two itself.
# export SBATCH_ACCOUNT=your_account
# export SBATCH_PARTITION=your_partition

# A virtual environment on a file system that all nodes see ...
: "${VENV:=$PWD/.venv}"
# ... or a container, by pyxis and enroot: docs/cluster.md has a recipe. Empty: none. Give the image's
# path: pyxis looks up a name without a slash in a registry.
: "${CONTAINER_IMAGE:=}"
# Folders that the container sees, separated by commas. The run directory is added automatically. Add
# the folders of model, data and caches if they are outside of this one.
: "${CONTAINER_MOUNTS:=$PWD}"

# GPUs per node: as requested by the job, even if its first node has more. The request may name a type
# (h100:8).
: "${GPUS_PER_NODE:=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}}"
GPUS_PER_NODE=${GPUS_PER_NODE##*:}

# Network interface between nodes, for all but bulk data; empty: NCCL and gloo choose.
: "${NETWORK_INTERFACE:=}"

# Packed microbatches vary in length, and blocks of many sizes would fragment GPU memory. For ranks only:
# engines start without it.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# Caches of data sets and tokenizers from the hub, on a file system that all nodes see. HF_HOME stays as
# it is, since it would also move the token of `hf auth login`. Compute nodes without internet access
# need HF_HUB_OFFLINE=1 and everything fetched beforehand.
export HF_HUB_CACHE="${HF_HUB_CACHE:-${HF_HOME:-$PWD/.cache/huggingface}/hub}"
export HF_DATASETS_CACHE="${HF_DATASETS_CACHE:-${HF_HOME:-$PWD/.cache/huggingface}/datasets}"

# Caches of compiled kernels, on each node's own disk: on a shared one, all processes of a job would wait
# for each other's locks. Later jobs use them, too. Four compiler processes per process of the job: the
# default is up to 32, and a node may have 16 processes.
NODE_CACHE=${NODE_CACHE:-/tmp/megatron-grpo-$UID}
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$NODE_CACHE/triton}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$NODE_CACHE/inductor}"
export VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$NODE_CACHE/vllm}"
export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-4}"
