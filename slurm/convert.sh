#!/usr/bin/env bash
# Convert a checkpoint on one node; needs no GPU. Takes the arguments of checkpoint-convert:
#   sbatch slurm/convert.sh import --hf models/Llama-3.3-70B-Instruct --out llama_70b --tp 8
#SBATCH --job-name=convert
#SBATCH --nodes=1
#SBATCH --exclusive
# All memory of the node: --exclusive alone allocates only the default amount.
#SBATCH --mem=0
#SBATCH --time=02:00:00
#SBATCH --output=%x_%j.log
source "${SLURM_SUBMIT_DIR:?submit this by sbatch, in the checkout}/slurm/job.sh" || exit 2
cd "$SLURM_SUBMIT_DIR"
source slurm/env.sh
step --nodes=1 --ntasks=1 checkpoint-convert "$@"
