# shellcheck shell=bash disable=SC2034
# What differs from site to site, in one place. Before a job:   source slurm/env.sh
# and every job reads it again. What is set in the environment already is left as it is.

# sbatch reads these two by itself.
# export SBATCH_ACCOUNT=your_account
# export SBATCH_PARTITION=your_partition

# A virtual environment on a file system that all nodes see ...
: "${VENV:=$PWD/.venv}"
# ... or a container, by pyxis and enroot: docs/cluster.md has a recipe. Empty: none. With its
# path: pyxis takes a name without a slash for one of a registry.
: "${CONTAINER_IMAGE:=}"
# By commas, what the container sees of the file system. The run directory is added. Model, data and
# caches are not: where they are elsewhere than here, so must their folders be.
: "${CONTAINER_MOUNTS:=$PWD}"

# GPUs of a node; Slurm knows, where it has been told of GPUs.
: "${GPUS_PER_NODE:=${SLURM_GPUS_ON_NODE:-8}}"

# The interface by which nodes reach each other for what is no bulk data; empty: NCCL and gloo choose.
: "${NETWORK_INTERFACE:=}"

# Packed microbatches are of any length, and blocks of many sizes would leave gaps in the memory of a
# GPU. Of ranks alone: engines are started without it.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# Data sets and tokenizers from the hub, seen by all nodes; not HF_HOME, where the token of `hf auth
# login` would be, too. A compute node without internet wants HF_HUB_OFFLINE=1 and what it needs
# fetched before.
export HF_HUB_CACHE="${HF_HUB_CACHE:-${HF_HOME:-$PWD/.cache/huggingface}/hub}"
export HF_DATASETS_CACHE="${HF_DATASETS_CACHE:-${HF_HOME:-$PWD/.cache/huggingface}/datasets}"
