#!/usr/bin/env bash
# Installs this checkout for NVIDIA GPUs into the active environment: bash requirements/gpu.sh
#
# It needs Python with its headers, a C++ compiler and a CUDA 13 toolkit, and compiles Transformer Engine's torch
# extension, in C++ alone: its CUDA kernels come as a wheel. MAX_JOBS bounds the processes of the compiler, and VLLM
# names another release than 0.32.0.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$(python -c 'import torch; print(torch.version.cuda)' 2>/dev/null)" = None ]; then
    echo "requirements/gpu.sh: torch is a build for CPUs in this environment: make another one" >&2
    exit 1
fi
# First the packages that the extension's build imports, and vLLM, which pins the torch that both are compiled against.
# vLLM and ModelOpt both take setuptools 80 alone.
python -m pip install "vllm==${VLLM:-0.32.0}" 'setuptools>=80,<81' wheel ninja pybind11 packaging -e .

# CUDA toolkits lack the headers of cuDNN and NCCL. Those of torch's packages have the versions that are loaded.
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
export CPLUS_INCLUDE_PATH=$packages/cudnn/include:$packages/nccl/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}
# The toolkit, and not the nvcc that a package of vLLM's brings, which is of another release than the headers beside it.
CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")}
# Without NVTE_PYTORCH_FORCE_BUILD the build may take a binary that was compiled against another torch; so may pip, from
# its cache or from an earlier installation.
export CUDA_HOME NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_FRAMEWORK=pytorch
python -m pip uninstall --yes transformer-engine-torch
python -m pip install --no-cache-dir --no-build-isolation -e '.[gpu,modelopt,test,wandb]'

# Needs no GPU, but torch first, whose CUDA libraries it shares.
python -c 'import torch, transformer_engine.pytorch'
