"""Print the demo's `model.dtype` as an override: bfloat16, or float32 where that is faster.

python -m demo.dtype
"""

import sys

import torch

from parallel.dtypes import product_dtype


def main() -> None:
    dtype = product_dtype(torch.bfloat16)
    if dtype == torch.float32:
        print(
            "The demo trains in float32, since this CPU has no instructions for bfloat16 "
            "(ARGS=model.dtype=bfloat16 has it in bfloat16, which takes many times as long).",
            file=sys.stderr,
        )
    print(f"model.dtype={str(dtype).removeprefix('torch.')}")


if __name__ == "__main__":
    main()
