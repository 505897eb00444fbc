#!/usr/bin/env bash
#SBATCH --job-name=grpo_70b_one_node
#SBATCH --nodes=1
#SBATCH --exclusive
# All memory of the node: --exclusive alone allocates only the default amount.
#SBATCH --mem=0
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.log
source "${SLURM_SUBMIT_DIR:?submit this by sbatch, in the checkout}/slurm/job.sh" || exit 2
run_job "${CONFIG:-configs/grpo_70b_one_node.yaml}" "$@"
