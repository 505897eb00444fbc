"""What a process holds, as the operating system says."""

from pathlib import Path

WIDE = {
    "num_hidden_layers": 12,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""Of a model of 47 million parameters, whose state is much more than what else a rank takes.

In float32: in bfloat16 oneDNN keeps its kernels for each length of a microbatch, about a megabyte
for each product.
"""


def held() -> int:
    """Bytes of this process's memory: what is its own and what it shares, but no mapped files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return 1024 * (sizes["Anonymous"] + sizes["Pss_Shmem"])
