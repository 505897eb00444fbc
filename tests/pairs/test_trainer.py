"""Two features that both are the trainer's, in two steps on the same generations.

A feature that only re-arranges the work leaves the weights of the other's run as they are, bit for
bit or, where sums change their order, nearly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.oracle.adapters import ATTENTION, TARGETS
from helpers.oracle.policies import tiny_config
from megatron_grpo.batch.experience import Experience
from megatron_grpo.config.config import Config
from pairs.features import ROWS, UNTRIED, family_of, legal_pairs, overrides_of
from pairs.oracle import Oracle
from pairs.replays import STEPS, Trained, World, make_model, record, write_rows
from parallel import ParallelDims

Features = tuple[str, ...]
DYNAMIC, HOST = "parallel.dynamic_context_parallel", "optimizer.optimizer_cpu_offload"
REPLAY, CONTINUED = "train.replay", "train.init_from"
SUMS = ("grpo.shared_prompts", DYNAMIC, HOST)
"""Features that change the order of sums."""
MOST_RUNS = 12
"""Largest number of runs in one world, so that no test takes minutes."""
ALSO = {
    "grpo.sync_ref_model": ["grpo.ref_model_sync_steps=1"],
    "rollout.quantization_aware": ["rollout.quantization=int8"],
    "train.export_quantization": ["train.export_quantization=int8"],
}
"""Overrides that suit a tiny model in a few steps."""


def marks_of(pair: Features) -> list[pytest.MarkDecorator]:
    """CI has the pairs that a dense text model has on two ranks; adapters that engines serve train
    as merged ones do."""
    if family_of(*pair) == "qwen3" and not {DYNAMIC, "lora.sync: adapter"} & {*pair}:
        return []
    return [pytest.mark.slow if pair in ARRANGED else pytest.mark.long]


def cases(pairs: Sequence[Features]) -> list[Any]:
    return [pytest.param(pair, id=" + ".join(pair), marks=marks_of(pair)) for pair in pairs]


TRAINED = {name for name, row in ROWS.items() if row.kind != "rollout"} - {REPLAY}
"""Features that are the trainer's; every run here is a replay."""
PAIRS = [pair for pair in legal_pairs() if {*pair} <= TRAINED and pair not in UNTRIED]
VALUES = [pair for pair in PAIRS if {ROWS[each].kind for each in pair} == {"value"}]
ARRANGED = [pair for pair in PAIRS if pair not in VALUES]


@dataclass(frozen=True)
class Run:
    """A run with `features`, of the family and with the layout and dtype of a pair."""

    features: Features
    family: str
    dtype: str = "float32"

    @property
    def world(self) -> World:
        experts = 1 if self.family == "qwen3" else 2
        context = 2 if DYNAMIC in self.features else 1
        dims = ParallelDims(data=2, expert=experts, context=context)
        return World(dims, DYNAMIC in self.features, HOST in self.features)


@dataclass
class Results:
    """Results of runs, each computed at first use, with others of its world."""

    folder: Path
    runs: Sequence[Run]
    """All runs of this session."""
    found: dict[Run, Trained] = field(default_factory=dict)
    configs: dict[Run, Config] = field(default_factory=dict)
    generations: dict[Run, list[Experience]] = field(default_factory=dict)

    def of(self, run: Run) -> Trained:
        if run not in self.found:
            others = [
                r for r in self.runs if r.world == run.world and r not in self.found and r != run
            ]
            together = [run, *others][:MOST_RUNS]
            results = run.world.train([self.config(each) for each in together])
            self.found |= zip(together, results, strict=True)
        return self.found[run]

    def config(self, run: Run) -> Config:
        name = f"{' and '.join(run.features)} of {run.family} in {run.dtype}".replace(": ", " ")
        rows, model = self.folder / "rows", self.folder / run.family
        if not rows.exists():
            write_rows(rows)
        if not model.exists():
            make_model(model, run.family)
        keys = [key for each in run.features for key in (*overrides_of(each), *ALSO.get(each, ()))]
        keys = [key for key in keys if not key.startswith(("train.init_from", "parallel.data"))]
        own = [f"data.path={rows / 'rows.jsonl'}", f"model.dtype={run.dtype}", *STEPS, *keys]
        own += [
            f"train.replay={self.folder / name} recorded",
            f"train.run_dir={self.folder / name}",
        ]
        if any(key.startswith("lora.") for key in keys):
            own.append(TARGETS.get(run.family, ATTENTION))
        first = 0
        if CONTINUED in run.features:
            first = 1
            own += ["train.num_steps=1", f"train.init_from={self.begun(run)}"]
        cfg = tiny_config(model, run.world.dims, *own)
        self.configs[run], self.generations[run] = cfg, record(cfg, first)
        return cfg

    def begun(self, run: Run) -> Path:
        """The folder of the run that ended after the first step, from which `run` goes on."""
        features = tuple(each for each in run.features if each != CONTINUED)
        cfg = self.config(replace(run, features=features))
        train = cfg.train.model_copy(
            update={
                "num_steps": 1,
                "run_dir": cfg.train.run_dir.with_name(f"{cfg.train.run_dir.name} begun"),
            }
        )
        run.world.train([cfg.model_copy(update={"train": train})])
        return train.run_dir


def runs_of(pair: Features) -> tuple[Run, Run]:
    """The run with both features, and the one without the re-arranging one."""
    family = family_of(*pair)
    dtype = "bfloat16" if HOST in pair else "float32"
    arranged = next(each for each in reversed(pair) if ROWS[each].kind == "arrangement")
    rest = tuple(each for each in pair if each != arranged)
    return Run(pair, family, dtype), Run(rest, family, dtype)


def values_of(pair: Features) -> Run:
    return Run(pair, family_of(*pair))


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    items = [item for item in request.session.items if item.path == request.path]
    pairs = [item.callspec.params["pair"] for item in items if hasattr(item, "callspec")]
    runs = {}
    for pair in pairs:
        runs |= dict.fromkeys(runs_of(pair) if pair in ARRANGED else [values_of(pair)])
    return Results(tmp_path_factory.mktemp("pairs"), [*runs])


@pytest.mark.parametrize("pair", cases(ARRANGED))
def test_a_feature_that_rearranges_trains_the_same_beside_another(results, pair):
    both, alone = map(results.of, runs_of(pair))
    exact = not {*pair} & {*SUMS}
    steps = alone[0][-len(both[0]) :]  # of a continued run, the last
    for ours, theirs in zip(both[0], steps, strict=True):
        for name in ("loss", "grad_norm", "kl"):
            close = theirs[name] if exact else pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
            assert ours[name] == close, name
    ours, theirs = both[1][-1], alone[1][-1]
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        if exact:
            assert torch.equal(ours[name], expected), name
        else:
            torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pair", cases(VALUES))
def test_features_that_change_what_is_trained_equal_an_oracle_that_has_both(
    results, pair, tmp_path
):
    """Each step begins at the ranks' weights: rounding would turn a last bit into a whole step."""
    run = values_of(pair)
    metrics, weights = results.of(run)
    oracle = Oracle(results.configs[run], tmp_path)
    for number, experience in enumerate(results.generations[run]):
        before, after = weights[number : number + 2]
        for name, expected in oracle.step(experience, before).items():
            found = metrics[number][name]
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), name
        moved = {name for name, values in after.items() if not values.equal(before[name])}
        assert moved == oracle.moved
        for name in moved:
            expected = oracle.trained[name]
            error, step = ((each - expected).norm() for each in (after[name], before[name]))
            assert error < 1e-5 * step + 1e-7 * expected.norm(), f"{name}: {error / step:.1e}"
