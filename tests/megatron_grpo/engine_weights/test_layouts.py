"""SGLang's shards of vision towers; tests/sglang/test_images.py asks SGLang itself."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from checkpoint_convert import read_shape
from checkpoint_convert.families.vision import VISION
from helpers.models.towers import tiny_multimodal
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engine_weights.layouts import first_worker, worker_dtypes, worker_layouts
from parallel import Layout

BLOCK = f"{VISION}blocks.0."
HIDDEN, SIZE, PLACES = 60, 32, 100


def held(layout: Layout, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A worker's tensors: weights and zeros where the layout has them, NaN elsewhere."""
    tensors = {name: torch.full(size, torch.nan) for name, size in layout.shapes.items()}
    for name, box in layout.zeros:
        tensors[name][box.slices] = 0
    for piece in layout.pieces:
        if piece.tensor in weights:
            tensors[piece.local][piece.local_box.slices] = weights[piece.tensor][piece.box.slices]
    return tensors


def test_sglang_pads_what_its_workers_split_of_vision_towers(tmp_path):
    sizes = {
        f"{BLOCK}attn.qkv.weight": (3 * SIZE, SIZE),
        f"{BLOCK}mlp.gate_proj.bias": (HIDDEN,),
        f"{BLOCK}mlp.up_proj.bias": (HIDDEN,),
        f"{BLOCK}mlp.down_proj.weight": (SIZE, HIDDEN),
        f"{BLOCK}mlp.down_proj.bias": (SIZE,),
        f"{VISION}pos_embed.weight": (PLACES, SIZE),
    }
    weights = {name: torch.randn(size) for name, size in sizes.items()}
    qkv, gate, up, down, bias, places = weights.values()
    shape = read_shape(tiny_multimodal(tmp_path, "qwen2_5_vl", tied=True))
    shape = replace(shape, vision=tuple(sizes.items()))
    rollout = RolloutConfig(engine="sglang", tensor_parallel_size=2, max_completion_length=16)
    layouts = worker_layouts(shape, rollout)
    assert layouts[0] == first_worker(shape, rollout)
    assert worker_dtypes(shape, rollout, "float32").keys() == layouts[0].shapes.keys()
    for number, layout in enumerate(layouts):
        found = {name: each for name, each in held(layout, weights).items() if VISION in name}
        wanted = {
            f"{BLOCK}attn.qkv_proj.weight": torch.cat(
                [each.chunk(2)[number] for each in qkv.chunk(3)]
            ),
            f"{BLOCK}mlp.gate_up_proj.bias": torch.cat(
                [pad(each, (0, 4)).chunk(2)[number] for each in (gate, up)]
            ),
            f"{BLOCK}mlp.down_proj.weight": pad(down, (0, 4)).chunk(2, dim=1)[number],
            f"{BLOCK}mlp.down_proj.bias": bias,
            f"{VISION}pos_embed.weight": pad(places, (0, 0, 0, 28)).chunk(2)[number],
        }
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            assert torch.equal(found[name], values), name
