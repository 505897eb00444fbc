#!/usr/bin/env bash
# Examine every host of a job, in the environment that jobs use. Takes the arguments of megatron-grpo doctor:
#   sbatch --wait --nodes=8 slurm/doctor.sh configs/grpo_70b.yaml; cat doctor_*.log
#SBATCH --job-name=doctor
#SBATCH --exclusive
# All memory of the node: --exclusive alone allocates only the default amount.
#SBATCH --mem=0
#SBATCH --gpus-per-node=8
#SBATCH --time=00:15:00
#SBATCH --output=%x_%j.log
source "${SLURM_SUBMIT_DIR:?submit this by sbatch, in the checkout}/slurm/job.sh" || exit 2
cd "$SLURM_SUBMIT_DIR"
source slurm/env.sh
use_network
MASTER_ADDR=$(address_of "$SLURMD_NODENAME")  # this script runs on the first node, as rank 0 does
MASTER_PORT=$(first_port)
export MASTER_ADDR MASTER_PORT
step --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    megatron-grpo doctor --report "$@"
