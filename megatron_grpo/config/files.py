"""Files that a config names: whether they are there, before anything that takes seconds."""

from collections.abc import Iterator
from pathlib import Path

from checkpoint_convert.sidecar import tokenizer_file
from megatron_grpo.config.config import Config
from megatron_grpo.config.eval import section_of


def check_files(cfg: Config) -> None:
    """Raise ValueError for a model, tokenizer, data or Python file of the user's that does not
    exist."""
    cfg.model.check_folder()
    tokenizer_file(cfg.model.path)
    cfg.data.check_exists()
    check_held_out(cfg)
    for kind, name in _user_code(cfg):
        if not (file := Path(name.rpartition(":")[0])).is_file():
            raise ValueError(f"{kind} {file} does not exist")


def check_held_out(cfg: Config) -> None:
    """Raise ValueError for held-out prompts that do not exist."""
    for name, held_out in cfg.eval.named_sets.items():
        assert held_out.data is not None, "a set has prompts"
        try:
            held_out.data.check_exists()
        except ValueError as error:
            raise ValueError(f"{section_of(name)}: {error}") from None


def _user_code(cfg: Config) -> Iterator[tuple[str, str]]:
    """What a config names as `file.py:name`, each with the kind of its file."""
    functions = [each.name for reward in cfg.rewards.values() for each in reward.functions]
    yield from (("file of reward functions", name) for name in functions if ":" in name)
    for view in cfg.by_source.values():
        if view.environment.name is not None:
            yield "file of an environment", view.environment.name
        if view.agent.function is not None:
            yield "file of an agent", view.agent.function
        yield from (("file of a tool", name) for name in view.agent.tools if ":" in name)
