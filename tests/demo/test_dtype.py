import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from demo import dtype
from parallel.dtypes import product_dtype

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs multiply bfloat16")
def test_demo_trains_in_float32_on_cpus_without_bfloat16():
    done = subprocess.run(
        [sys.executable, "-m", "demo.dtype"],
        cwd=REPOSITORY,
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},  # whatever this CPU could do
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "model.dtype=float32\n"
    assert "this CPU has no instructions for bfloat16" in done.stderr


@pytest.mark.skipif(
    product_dtype(torch.bfloat16) != torch.bfloat16, reason="this machine emulates bfloat16"
)
def test_demo_trains_in_bfloat16_on_cpus_that_multiply_it(capsys):
    dtype.main()
    assert capsys.readouterr() == ("model.dtype=bfloat16\n", "")
