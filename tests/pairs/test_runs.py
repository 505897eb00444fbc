"""Two features of which one changes how samples are made: whole runs, and replays of their samples.

What a run with both trains on its samples is what a replay without that feature does, bit for bit.
The samples are those of the stream, each trained once, of weights that are new enough, and have the
trainer's log-probabilities.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.tokenizer import load_tokenizer
from demo.make_squares import write as write_squares
from demo.make_sums import sums
from helpers.engines.json_server import Request, json_server
from helpers.engines.live import SGLANG_PYTHON, TestEngine, running_engine
from helpers.models.images import tiny_vision_model
from helpers.models.tiny import add_mtp_layer, mixture_of_blocks
from helpers.oracle.optimizers import allow_offload
from helpers.runs.in_flight import BATCH_SIZE, NUM_GENERATIONS, check_run, spans_of
from helpers.runs.jobs import Runs
from helpers.runs.train import TINY_CONFIG, read_json_lines, read_metrics
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import load_config
from megatron_grpo.rollout.services import load_stream
from pairs.features import CORRECTED, ROWS, family_of, legal_pairs, overrides_of

NUM_STEPS = 4
"""The third and fourth generation can be of weights that a push in the run has brought."""
COMMON = [
    CORRECTED,
    f"train.num_steps={NUM_STEPS}",
    "train.max_tokens_per_microbatch=2048",
    f"grpo.generation_batch_size={BATCH_SIZE}",
    f"grpo.num_generations={NUM_GENERATIONS}",
    "rollout.max_completion_length=64",
]
QUANTISED = {"rollout.quantization", "rollout.quantization_aware"}
ON_HOST = "optimizer.optimizer_cpu_offload"
SHORT = {
    *("environment", "agent", "environment with grpo.supervision: process"),
    *("grpo.dynamic_sample", "grpo.dynamic_sample_temperature"),
}
"""Features for which completions must be short: for several turns, or for equal rewards."""
STOPS = f"rollout.stop_token_ids={[*range(40, 100)]}"  # of 250
AGENT = '''
async def ask_twice(client, row):
    """Asks anew with other words, so that a sample has two branches."""
    for words in (row["prompt"], "something else"):
        messages = [{"role": "user", "content": words}]
        answer = await client.chat.completions.create(model="policy", messages=messages)
    return len(answer.choices[0].message.content) / 100
'''
OF_ENGINES = (
    "rollout.engine: sglang",
    "rollout.indexer_replay",
    "rollout.router_replay",
    "rollout.quantization_aware",
    "rollout.quantization",
    "rollout.vllm.speculative_config",
    "lora.sync: adapter",
    "model.freeze_vision: false",
    ON_HOST,
)
"""Features whose runs need an engine with arguments of its own."""
ON_GPUS = {
    ("rollout.quantization", "rollout.router_replay"): "vLLM reports routes on GPUs alone",
    ("rollout.router_replay", "rollout.vllm.speculative_config"): "vLLM reports routes on GPUs "
    "alone",
    ("rollout.quantization", "rollout.indexer_replay"): "SGLang has sparse attention on GPUs alone",
}
"""Pairs that no engine has on CPUs, and why."""
IN_CI = {
    ("rollout.over_sampling", "agent"),
    ("train.offload: all", "rollout.weight_transport: disk"),
    ("rollout.max_staleness", "grpo.shared_prompts"),
    ("lora.sync: merged", "environment"),
}
Pair = tuple[str, str]


def samples_otherwise(feature: str) -> bool:
    return ROWS[feature].kind == "rollout"


def on_one_engine(pair: Pair) -> tuple[str, ...]:
    """Sorts pairs so that each engine is started once."""
    return family_of(*pair), *(feature for feature in OF_ENGINES if feature in pair)


def with_marks(pair: Pair):
    """The pair as a parameter, skipped if this machine has no engine for it."""
    marks = [pytest.mark.long if pair in IN_CI else pytest.mark.slow]
    if reason := ON_GPUS.get(pair):
        marks.append(pytest.mark.skip(reason=reason))
    elif "rollout.engine: sglang" in pair and not SGLANG_PYTHON.exists():
        marks.append(pytest.mark.skip(reason="`make setup-sglang` makes it"))
    return pytest.param(pair, marks=marks)


PAIRS = sorted(
    (pair for pair in legal_pairs() if any(map(samples_otherwise, pair))), key=on_one_engine
)


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Iterator[dict[str, str]]:
    """What stands in runs in place of the commands, paths and addresses of `ROWS`."""
    (file := tmp_path_factory.mktemp("agent") / "mine.py").write_text(AGENT)

    def score(request: Request) -> tuple[int, object]:
        return 200, {"data": [{"data": [len(json.dumps(request.body)) % 7]}]}

    with json_server(score) as reward_model:
        yield {
            "agent.command=agent": f"agent.function={file}:ask_twice",
            "http://host/v1": reward_model.url,
            "rollout.python=python": f"rollout.python={SGLANG_PYTHON}",
        }


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Sums of a kind, each with a picture."""
    path = write_squares(tmp_path_factory.mktemp("rows"))
    images = [row["image"] for row in read_json_lines(path)]
    pairs = zip(sums(), images, strict=False)
    rows = [row | {"image": image, "kind": "a"} for row, image in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")

    @cache
    def model_of(family: str) -> Path:
        if family == "qwen3_vl_moe":
            return tiny_vision_model(folder / family, family)
        made = mixture_of_blocks(folder / family, family)
        return add_mtp_layer(made) if family == "glm4_moe" else made

    return model_of


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    """The engine of a config; it ends when another is needed."""
    with ExitStack() as stack:
        running: dict[str, TestEngine] = {}

        def engine_of(cfg: Config) -> TestEngine:
            rollout, kind = cfg.rollout, cfg.rollout.engine
            if rollout.indexer_replay or (rollout.router_replay and kind == "vllm"):
                kind = "reference"  # those two report no choices on CPUs
            given = {"quantization", "vllm", "sglang", "router_replay", "indexer_replay"}
            how: dict[str, Any] = rollout.model_dump(include=given)
            how |= {"engine": kind, "folder": cfg.model.path, "dtype": cfg.model.dtype}
            how |= {"freeze_vision": cfg.model.freeze_vision}
            how |= {"lora": cfg.lora} if cfg.lora.is_served else {}
            how |= {"python": SGLANG_PYTHON} if kind == "sglang" else {}
            if (key := str(how)) not in running:
                stack.close()
                running.clear()
                logs = tmp_path_factory.mktemp("logs")
                running[key] = stack.enter_context(running_engine(log_dir=logs, **how))
            return running[key]

        yield engine_of


def check_prompts(run_dir: Path) -> None:
    """Assert that the run has trained on the prompts of the stream, each once; over-sampling takes
    some of later generations, and dynamic sampling any others."""
    cfg = load_config(run_dir / "config.yaml")
    stream = load_stream(cfg, read_shape(cfg.model.path), load_tokenizer(cfg.model.path))
    taken = [prompt.index for step in range(NUM_STEPS) for prompt in stream.batch(step)]
    trained = {row["prompt_index"] for row in read_json_lines(run_dir / "completions.jsonl")}
    assert cfg.grpo.dynamic_sample or len(trained) == len(taken)
    assert cfg.grpo.dynamic_sample or cfg.rollout.over_sampling > 1 or trained == {*taken}


def check_gaps(run_dir: Path) -> None:
    """Assert that samples of the newest weights have the trainer's log-probabilities."""
    bound = 1e-3 if load_config(run_dir / "config.yaml").model.dtype == "float32" else 0.5
    for row in read_json_lines(run_dir / "completions.jsonl"):
        if [version for version, _ in spans_of(row)] == [row["step"] - 1]:
            assert row["logprob_gap"] < bound, row


def assert_trained_alike(run_dir: Path, other: Path) -> None:
    for key in ("step", "loss", "grad_norm"):
        ours, theirs = ([row[key] for row in read_metrics(each)] for each in (run_dir, other))
        assert ours == theirs
    files = [*(run_dir / "hf").glob("*.safetensors")]
    assert files
    for file in files:
        assert file.read_bytes() == (other / "hf" / file.name).read_bytes(), file.name


def allow(rank: int) -> None:
    allow_offload()


@pytest.mark.parametrize("pair", [*map(with_marks, PAIRS)], ids=[*map(" + ".join, PAIRS)])
def test_samples_are_trained_on_as_by_a_replay_without_the_feature(
    pair, model_of, data, places, engine_of, tmp_path
) -> None:
    made, again = tmp_path / "made", tmp_path / "again"

    def overrides(*features: str) -> list[str]:
        text = "\n".join(overrides_of(*features)).replace("runs/a", str(tmp_path / "first"))
        for name, place in places.items():
            text = text.replace(name, place)
        return text.splitlines()

    arguments = [*COMMON, f"model.path={model_of(family_of(*pair))}", f"data.path={data}"]
    if {*QUANTISED, ON_HOST} & {*pair}:
        arguments.append("model.dtype=bfloat16")
    if SHORT & {*pair}:
        arguments.append(STOPS)
    sampled = overrides(*(each for each in pair if each != "train.replay"))
    engine = engine_of(load_config(TINY_CONFIG, [*arguments, *sampled]))
    axis = "context" if "parallel.dynamic_context_parallel" in pair else "data"
    runs = Runs(arguments, engine, tmp_path, (axis,))
    how = {"sabotage": allow} if ON_HOST in pair else {}
    if "train.init_from" in pair:
        runs.finish("first", "train.num_steps=1")
    runs.finish(made, *sampled, "train.save_generations=true", **how)
    is_kept = [not samples_otherwise(each) or "train.replay" in pair for each in pair]
    kept = overrides(*(each for each, is_kept in zip(pair, is_kept, strict=True) if is_kept))
    runs.finish(again, *kept, f"train.replay={made}", engine=None, **how)
    check_run(made, NUM_STEPS, load_config(made / "config.yaml").rollout.max_staleness)
    check_prompts(made)
    check_gaps(made)
    assert_trained_alike(again, made)
