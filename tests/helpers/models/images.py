"""Tiny models that take images, and sequences with images in their prompts."""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image as PIL
from torch import Tensor

from checkpoint_convert.tokenizer import load_tokenizer
from helpers.models.tiny import character_tokenizer
from helpers.models.towers import tiny_multimodal
from helpers.oracle.policies import tiny_config
from megatron_grpo.config.config import Config
from megatron_grpo.data.prompts import Prompt, load_prompts
from parallel import ParallelDims
from parallel.images import PromptImages, prompt_positions
from parallel.packing import TokenSequence

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, IMAGE, _ = range(246, 250)
MERGE = 2  # patches along each side of what becomes one token
FAMILY = "qwen2_5_vl"
PATCH_SIZES = {FAMILY: 14, "qwen3_vl": 16, "qwen3_vl_moe": 16}
IMAGE_LIMITS = {"limit_mm_per_prompt": {"image": 2, "video": 0}}
TEMPLATE = (
    "{% for message in messages %}<start>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
OF_QWEN3_VL = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSORS: dict[str, dict[str, Any]] = {
    FAMILY: {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 112 * 112,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "qwen3_vl": OF_QWEN3_VL,
    "qwen3_vl_moe": OF_QWEN3_VL,
}


def tiny_vision_model(
    folder: Path, family: str = FAMILY, *, seed: int = 0, **overrides: Any
) -> Path:
    """Save a random model with a tokenizer of characters and image tokens; `overrides` are fields
    of its `text_config`."""
    tiny_multimodal(folder, family, tied=True, seed=seed, **overrides)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"vision_start_token_id": START, "vision_end_token_id": END}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = character_tokenizer(START)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", *TOKENS]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes = {"patch_size": PATCH_SIZES[family], "temporal_patch_size": 2, "merge_size": MERGE}
    processor = json.dumps(PROCESSORS[family] | sizes)
    (folder / "preprocessor_config.json").write_text(processor, encoding="utf-8")
    return folder


def random_images(
    grids: list[tuple[int, int]],
    starts: list[int],
    num_tokens: int,
    generator: torch.Generator,
    family: str = FAMILY,
) -> PromptImages:
    """Images of ``(height, width)`` patches; their tokens begin at `starts` of the prompt."""
    sizes = [(1, height // MERGE, width // MERGE) for height, width in grids]
    patches = torch.randint(
        256,
        (sum(h * w for h, w in grids), 3 * 2 * PATCH_SIZES[family] ** 2),
        dtype=torch.uint8,
        generator=generator,
    )
    places = [torch.arange(s, s + h * w) for s, (_, h, w) in zip(starts, sizes, strict=True)]
    return PromptImages(
        patches=patches,
        grids=torch.tensor([(1, *grid) for grid in grids]),
        digests=tuple(
            hashlib.blake2b(own.numpy().tobytes()).hexdigest()
            for own in patches.split([height * width for height, width in grids])
        ),
        tokens=torch.cat(places),
        positions=prompt_positions(num_tokens, starts, sizes),
    )


def normalized(patches: Tensor, family: str = FAMILY) -> Tensor:
    """The `pixel_values` that transformers' processor makes of patches in 0 to 255."""
    mean, std = (
        torch.tensor(PROCESSORS[family][f"image_{x}"])[:, None] / (1 / 255) for x in ("mean", "std")
    )
    return ((patches.view(len(patches), 3, -1) - mean) / std).flatten(1)


def logits(model: Any, tokens: Tensor, images: PromptImages | None) -> Tensor:
    """Logits of transformers' model for `tokens` [1, L], a prompt with `images` and a completion.

    Features are placed here, not by `pixel_values`, since transformers would also replace image
    tokens that were sampled.
    """
    if images is None:
        return model(input_ids=tokens).logits
    embeddings, types = model.get_input_embeddings()(tokens).clone(), torch.zeros_like(tokens)
    types[0, images.tokens] = 1
    pixels = normalized(images.patches, model.config.model_type).to(embeddings)
    seen = model.model.get_image_features(pixels, images.grids, return_dict=True)
    embeddings[0, images.tokens] = torch.cat(seen.pooler_output)
    positions, _ = model.model.get_rope_index(tokens, types, image_grid_thw=images.grids)
    levels = getattr(seen, "deepstack_features", ())
    inner = model.model.language_model(
        inputs_embeds=embeddings,
        position_ids=positions,
        visual_pos_masks=types.bool(),
        deepstack_visual_embeds=[torch.cat(level) for level in levels],
    )
    return model.lm_head(inner.last_hidden_state)


def picture(width: int, height: int, seed: int = 0) -> PIL.Image:
    """An image of random pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return PIL.fromarray(pixels.numpy())


def image_config(model: Path, folder: Path, *overrides: str) -> Config:
    """The tiny config with the rows in `folder`, with up to two images in a prompt."""
    data = [f"data.path={folder / 'rows.jsonl'}", "data.image_column=image"]
    limits = [f"rollout.vllm={json.dumps(IMAGE_LIMITS)}"]
    return tiny_config(model, ParallelDims(), *data, *limits, *overrides)


def prompts_with_images(
    model: Path, folder: Path, images: list[Any], *overrides: str
) -> list[Prompt]:
    """Prompts of rows with `images` as values of their image column, written to `folder`."""
    rows = [{"prompt": "Which?", "answer": "a", "image": each} for each in images]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    return load_prompts(image_config(model, folder, *overrides), load_tokenizer(model), 512)


def sequence_with_images(
    grids: list[tuple[int, int]],
    num_response_tokens: int,
    seed: int,
    loss_weight: float = 1.0,
    family: str = FAMILY,
) -> TokenSequence:
    """Random text around each image, and a random completion that contains an image token."""
    generator = torch.Generator().manual_seed(seed)

    def text(num_tokens: int) -> Tensor:
        return torch.randint(4, START, (num_tokens,), generator=generator)

    parts, starts = [text(3)], []
    for height, width in grids:
        starts.append(sum(map(len, parts)) + 1)
        image = torch.full((height * width // MERGE**2,), IMAGE)
        parts += [torch.tensor([START]), image, torch.tensor([END]), text(2)]
    prompt = torch.cat(parts)
    completion = text(num_response_tokens)
    completion[1] = IMAGE
    return TokenSequence(
        tokens=torch.cat([prompt, completion]),
        num_prompt_tokens=len(prompt),
        advantage=1.0,
        loss_weight=loss_weight,
        rollout_logprobs=torch.zeros(num_response_tokens),
        images=random_images(grids, starts, len(prompt), generator, family) if grids else None,
    )


def with_completion(sequence: TokenSequence, num_tokens: int, seed: int) -> TokenSequence:
    """The same prompt with another completion."""
    generator = torch.Generator().manual_seed(seed)
    prompt = sequence.tokens[: sequence.num_prompt_tokens]
    own = torch.randint(4, START, (num_tokens,), generator=generator)
    tokens = torch.cat([prompt, own])
    return replace(sequence, tokens=tokens, rollout_logprobs=torch.zeros(num_tokens))


def branch_with_image(
    root: TokenSequence, grid: tuple[int, int], seed: int, family: str = FAMILY
) -> TokenSequence:
    """Sequence 0, `root`, up to the second token of its completion; then text around one more image
    of ``(height, width)`` patches."""
    assert isinstance(root.images, PromptImages)
    generator = torch.Generator().manual_seed(seed)
    own = sequence_with_images([grid], 4, seed, family=family)
    context = root.tokens[: root.num_prompt_tokens + 2]
    before, after = root.images, random_images([grid], [4], len(own.tokens), generator, family)
    positions = before.positions_of(slice(len(context)))
    return replace(
        root,
        root=0,
        tokens=torch.cat([context, own.tokens]),
        num_prompt_tokens=len(context),
        rollout_logprobs=torch.zeros(len(own.tokens)),
        images=PromptImages(
            patches=torch.cat([before.patches, after.patches]),
            grids=torch.cat([before.grids, after.grids]),
            digests=before.digests + after.digests,
            tokens=torch.cat([before.tokens, after.tokens + len(context)]),
            positions=torch.cat([positions, after.positions + positions.max() + 1], dim=1),
        ),
    )


def with_other_pixels(sequence: TokenSequence) -> TokenSequence:
    """The same tokens after other images of the same sizes."""
    assert sequence.images is not None
    patches = 255 - sequence.images.patches
    images = replace(sequence.images, patches=patches, digests=("others",))
    return replace(sequence, images=images)


if __name__ == "__main__":
    tiny_vision_model(Path(sys.argv[1]))  # the model of configs/learn_colours.yaml
