"""Side effects of importing Megatron-Core, tested in a separate process."""

import json
import subprocess
import sys

import pytest
import torch

LOADED = """
import json, sys, torch
before = torch.compile
from parallel.megatron_import import import_megatron
import_megatron()
import megatron_grpo.trainer
assert torch.compile is before
print(json.dumps([name for name in {names} if name in sys.modules]))
import wandb, torch.utils.tensorboard
"""
HEAVY = ["wandb", "torch.utils.tensorboard", "transformers", "matplotlib"]
COMPILER = ["torch._dynamo", "torch._inductor"]


@pytest.mark.long
def test_a_rank_starts_without_unused_imports():
    names = HEAVY if torch.cuda.is_available() else HEAVY + COMPILER
    command = [sys.executable, "-W", "ignore", "-c", LOADED.format(names=names)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == []
