"""Rows with images become prompts, as the model's own processor makes them."""

import base64
import json
import sys
from io import BytesIO

import datasets
import pytest
import torch
from PIL import ExifTags, Image, ImageFile, ImageOps
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from checkpoint_convert.tokenizer import load_tokenizer
from helpers.models.images import (
    IMAGE,
    IMAGE_LIMITS,
    PATCH_SIZES,
    image_config,
    normalized,
    picture,
    prompts_with_images,
    tiny_vision_model,
)
from helpers.models.towers import tiny_multimodal
from megatron_grpo.data.images import check_images, read_images
from megatron_grpo.data.prompts import load_prompts
from megatron_grpo.data.samples import logged_columns
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.engines.vllm.args import check_engine_arguments
from megatron_grpo.prompt_checks import _short_text


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("model"))


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("family", PATCH_SIZES)
def test_patches_tokens_and_positions_are_those_of_transformers(family, tmp_path):
    model = tiny_vision_model(tmp_path / "model", family)
    pictures = [picture(60, 90), picture(56, 56), picture(300, 120)]  # the first and last resized
    for number, each in enumerate(pictures):
        each.save(tmp_path / f"{number}.png")
    encoded = "data:image/png;base64," + base64.b64encode(png(pictures[0])).decode()
    values = [["0.png", {"bytes": None, "path": "1.png"}], [encoded, "2.png"], None, []]
    several, others, *of_text = prompts_with_images(model, tmp_path, values)
    processor = AutoImageProcessor.from_pretrained(model)
    whole = AutoModelForImageTextToText.from_pretrained(model)
    for prompt, own in ((several, pictures[:2]), (others, pictures[::2])):
        images, wanted = prompt.images.read(), processor(images=own, return_tensors="pt")
        assert torch.equal(images.grids, wanted["image_grid_thw"])
        torch.testing.assert_close(
            normalized(images.patches, family), wanted["pixel_values"], atol=1e-5, rtol=0
        )
        tokens = torch.tensor([[*prompt.token_ids]])
        assert torch.equal((tokens[0] == IMAGE).nonzero()[:, 0], images.tokens)
        positions, _ = whole.model.get_rope_index(
            tokens, (tokens == IMAGE).int(), image_grid_thw=images.grids
        )
        assert torch.equal(images.positions_of(slice(len(tokens[0]))), positions[:, 0])
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    assert several.text.startswith(f"<start>user\n{mark}{mark}Which?")
    assert all(each.images is None and IMAGE not in each.token_ids for each in of_text)


@pytest.mark.parametrize("is_on_hub", [False, True])
@pytest.mark.parametrize("is_list", [False, True])
def test_features_of_images_are_read_as_they_are_stored(
    model, tmp_path, monkeypatch, is_on_hub, is_list
):
    picture(60, 90).save(tmp_path / "0.png")
    values = [str(tmp_path / "0.png"), {"bytes": png(picture(56, 56)), "path": None}]
    columns = {
        "prompt": ["Which?"] * 2,
        "answer": ["a"] * 2,
        "parts": [[{"a": 0}, {"b": "c"}], []],  # a column that must stay decoded
        "image": [[each] for each in values] if is_list else values,
    }
    features = datasets.Features(
        prompt=datasets.Value("string"),
        answer=datasets.Value("string"),
        parts=datasets.List(datasets.Json()),
        image=datasets.List(datasets.Image()) if is_list else datasets.Image(),
    )
    file = tmp_path / "rows.parquet"
    saved = datasets.Dataset.from_dict(columns, features)
    saved.to_parquet(file)
    if is_on_hub:  # out of reach here
        monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split: saved)
    cfg = image_config(model, tmp_path, f"data.path={'some/squares' if is_on_hub else file}")
    prompts = load_prompts(cfg, load_tokenizer(model), 512)
    for prompt, size in zip(prompts, [(1, 6, 4), (1, 4, 4)], strict=True):
        assert prompt.images.read().grids.tolist() == [[*size]]
    if is_on_hub:
        assert prompts[0].row["parts"] == columns["parts"][0]


def test_invalid_images_are_refused_row_by_row(model, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    picture(600, 2).save(tmp_path / "thin.png")
    picture(56, 56).save(tmp_path / "good.png")
    Image.new("I;16", (56, 56)).save(tmp_path / "wide.png")
    bitmap = BytesIO()
    picture(56, 56).save(bitmap, "BMP")
    sides = (10**5).to_bytes(4, "little") + (10**4).to_bytes(4, "little")
    (tmp_path / "huge.bmp").write_bytes(bitmap.getvalue()[:18] + sides + bitmap.getvalue()[26:])
    rows = {
        "https://host/a.png": "is a URL: download the image and give its path: 'https://host/a",
        7: "nor a list of them: image 1 of the row: int",
        "data:image/png;base64,?": "is not base64: image 1 of the row: ",
        "absent.png": "cannot be read: 'absent.png': No such file or directory",
        base64.b64encode(bytes(3000)).decode(): "; base64 begins with data:image/png;base64,",
        "text.png": "cannot be read: 'text.png': cannot identify image file",
        "thin.png": "cannot be read: 'thin.png': absolute aspect ratio must be smaller than 200",
        "wide.png": "'wide.png': pixels of mode I;16: save it with 8 bits per channel",
        "huge.bmp": "'huge.bmp': Image size (1000000000 pixels) exceeds limit",
    }
    assert len(rows) == 9
    with pytest.raises(ValueError, match="10 of 10 rows") as refused:
        prompts_with_images(model, tmp_path, [*rows, ["good.png"] * 3])
    for number, error in enumerate([*rows.values(), "limit_mm_per_prompt.image: 3 of at most 2"]):
        [line] = [each for each in str(refused.value).splitlines() if f"line {number + 1}:" in each]
        assert error in line and len(line) < 500


@pytest.mark.parametrize("kind", ["png", "jpeg", "tiff"])
@pytest.mark.parametrize("orientation", [3, 6])
def test_images_are_turned_by_exif_and_counted_by_their_headers(
    model, tmp_path, monkeypatch, kind, orientation
):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    picture(60, 90).save(tmp_path / f"0.{kind}", exif=exif)
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it is decoded"))
        [prompt] = prompts_with_images(model, tmp_path, [f"0.{kind}"])
    images = prompt.images.read()
    upright = ImageOps.exif_transpose(Image.open(tmp_path / f"0.{kind}"))
    wanted = AutoImageProcessor.from_pretrained(model)(images=upright, return_tensors="pt")
    assert torch.equal(images.grids, wanted["image_grid_thw"])
    torch.testing.assert_close(
        normalized(images.patches), wanted["pixel_values"], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(model, tmp_path, mode):
    seen = Image.new("RGBA", (56, 56), (0, 0, 0, 0))
    seen.paste((255, 0, 0, 255) if mode != "LA" else (76, 76, 76, 255), (0, 0, 28, 56))
    if mode == "P":
        seen.quantize(4).save(tmp_path / "0.png")
    else:
        seen.convert(mode).save(tmp_path / "0.png")
    white = Image.new("RGB", (56, 56), "white")
    white.paste((255, 0, 0) if mode != "LA" else (76, 76, 76), (0, 0, 28, 56))
    white.save(tmp_path / "1.png")
    own, wanted = prompts_with_images(model, tmp_path, ["0.png", "1.png"])
    assert torch.equal(own.images.read().patches, wanted.images.read().patches)


def test_a_file_that_is_damaged_or_changes_or_is_gone_is_named(model, tmp_path):
    picture(60, 90).save(tmp_path / "0.png")
    (tmp_path / "cut.png").write_bytes(png(picture(100, 100))[:-5000])
    encoded = base64.b64encode((tmp_path / "cut.png").read_bytes()).decode()
    values = ["0.png", "cut.png", ["0.png", f"data:image/png;base64,{encoded}"]]
    changed, cut, second = prompts_with_images(model, tmp_path, values)
    with pytest.raises(OSError, match=r"^'cut\.png': .*truncated"):
        cut.images.read()
    with pytest.raises(OSError, match=r"^image 2 of the row: .*truncated"):
        second.images.read()
    picture(90, 90).save(tmp_path / "0.png")
    with pytest.raises(OSError, match=r"^'0\.png': it has 9 tokens now, and had 6 when"):
        changed.images.read()
    picture(2, 900).save(tmp_path / "0.png")
    with pytest.raises(OSError, match=r"^'0\.png': absolute aspect ratio"):
        changed.images.read()
    (tmp_path / "0.png").unlink()
    with pytest.raises(OSError, match=r"^'0\.png': No such file"):
        changed.images.read()


def test_images_of_many_prompts_are_read_at_once_and_a_damaged_one_ends_it(model, tmp_path):
    for number in range(8):
        picture(60 + 8 * number, 90, number).save(tmp_path / f"{number}.png")
    prompts = prompts_with_images(model, tmp_path, [*(f"{n}.png" for n in range(8)), None])
    sources = [each.images for each in [*prompts, *prompts[::3]]]
    found = read_images(sources, lambda images: images.digests)
    assert found == {each.images: each.images.read().digests for each in prompts[:8]}
    (tmp_path / "3.png").unlink()
    with pytest.raises(OSError, match=r"^'3\.png': No such file"):
        read_images(sources, lambda images: images)


def test_data_that_moves_has_the_same_fingerprint(model, tmp_path):
    marks = []
    for folder in (tmp_path / "old", tmp_path / "new"):
        folder.mkdir()
        picture(56, 56).save(folder / "0.png")
        prompts = prompts_with_images(model, folder, ["0.png"])
        marks.append(PromptStream(prompts, 1, seed=0, shuffle=True).fingerprint)
    picture(56, 56).save(folder / "1.png")
    others = PromptStream(prompts_with_images(model, folder, ["1.png"]), 1, seed=0, shuffle=True)
    assert marks[0] == marks[1] != others.fingerprint


@pytest.mark.parametrize(
    ("override", "error"),
    [
        (
            "rollout.engine=sglang + rollout.vllm={}",
            "rollout.sglang.limit_mm_data_per_request is None: set it to {image: 1}, with",
        ),
        ("rollout.vllm={}", "limit_mm_per_prompt is None: set it to {image: 1, video: 0}"),
        ("rollout.vllm.limit_mm_per_prompt.image=true", "set it to {image: 1, video: 0}"),
        ("rollout.vllm.limit_mm_per_prompt.image=0", "set it to {image: 1, video: 0}"),
        ("rollout.vllm.limit_mm_per_prompt.image={count: 1}", "set it to {image: 1, video: 0}"),
        ("rollout.vllm.limit_mm_per_prompt.video=1", "set it to {image: 1, video: 0}"),
    ],
)
def test_engines_that_take_no_images_are_refused(model, tmp_path, override, error):
    with pytest.raises(ValueError, match=r"data\.image_column") as refused:
        check_images(image_config(model, tmp_path, *override.split(" + ")))
    assert error in str(refused.value)


@pytest.mark.parametrize(
    ("family", "rope", "vision", "error"),
    [
        ("qwen3_vl", {"mrope_interleaved": False}, {}, "and mrope_interleaved True"),
        ("qwen2_5_vl", {"mrope_interleaved": True}, {}, "and mrope_interleaved False"),
        ("qwen3_vl", {"mrope_section": [4, 6, 7]}, {}, "three sizes whose sum is 16"),
        ("qwen3_vl", {}, {"deepstack_visual_indexes": None}, "_indexes of vision_config is None"),
        ("qwen3_5", {}, {}, "images are supported for qwen2_5_vl, qwen3_vl, qwen3_vl_moe only"),
    ],
)
def test_check_images_refuses_unsupported_models(tmp_path, family, rope, vision, error):
    folder = tiny_multimodal(tmp_path / "model", family)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"] |= rope
    config["vision_config"] |= vision
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=error):
        check_images(image_config(folder, tmp_path))


def test_a_missing_package_that_vllm_needs_for_images_is_named(monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ValueError, match="limit_mm_per_prompt: vLLM needs torchvision"):
        check_engine_arguments(IMAGE_LIMITS)
    with pytest.raises(ValueError, match=r"set max_pixels in preprocessor_config\.json"):
        check_engine_arguments({"mm_processor_kwargs": {"max_pixels": 3136}})


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("<image>Which?", "'prompt' has <image> in its text: take it out"),
        ([{"role": "system", "content": "Look."}], "'prompt' has no message of the user"),
    ],
)
def test_prompts_without_a_place_for_images_are_refused(model, tmp_path, prompt, error):
    picture(56, 56).save(tmp_path / "0.png")
    row = {"prompt": prompt, "answer": "a", "image": "0.png"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match="1 of 1 rows") as refused:
        load_prompts(image_config(model, tmp_path), load_tokenizer(model), 512)
    assert error in str(refused.value)


def test_logs_have_paths_of_images_and_no_contents():
    coded = "data:image/png;base64," + "A" * 3000
    row = {"prompt": "Which?", "image": ["0.png", coded, {"bytes": bytes(9), "path": None}]}
    logged = ["0.png", "3022 characters of base64", {"bytes": "9 bytes", "path": None}]
    assert logged_columns(row, "prompt") == {"image": logged}


def test_printed_prompts_have_the_number_of_image_tokens(model, tmp_path):
    for number, size in enumerate([(60, 90), (56, 56)]):
        picture(*size).save(tmp_path / f"{number}.png")
    [prompt] = prompts_with_images(model, tmp_path, [["0.png", "1.png"]])
    shown = _short_text(prompt, load_tokenizer(model))
    assert "<|vision_start|>6 <|image_pad|><|vision_end|>" in shown
    assert "<|vision_start|>4 <|image_pad|><|vision_end|>" in shown
