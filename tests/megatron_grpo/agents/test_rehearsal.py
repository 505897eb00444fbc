"""Sessions that `check` plays with the row's answer, and shows with their mask."""

from checkpoint_convert import read_shape
from checkpoint_convert.tokenizer import load_tokenizer
from helpers.runs.agents import FUNCTIONS
from helpers.runs.jobs import write_sums
from helpers.runs.train import TINY_CONFIG
from megatron_grpo.agents.rehearsal import rehearse
from megatron_grpo.config.file import load_config
from megatron_grpo.data.prompts import end_tokens, load_prompts

STUBBORN = """
class Stubborn:
    def reset(self, prompt, **_):
        return " Ready?"

    def step(self, text):
        if text == "broken":
            raise RuntimeError("out of order")
        return f"Not {text}.", 0.5, False
"""


def played(model, folder, *overrides, **columns) -> list[str]:
    """Lines of a rehearsal with the first row of the data, changed to these columns."""
    (folder / "code.py").write_text(STUBBORN + FUNCTIONS)
    settings = [f"model.path={model}", f"data.path={write_sums(folder)}", *overrides]
    cfg = load_config(TINY_CONFIG, [*settings, "data.max_prompt_length=64"])
    shape, tokenizer = read_shape(model), load_tokenizer(model)
    prompt = load_prompts(cfg, tokenizer, shape.max_position_embeddings)[0]
    prompt.row.update(columns)
    return rehearse(cfg, tokenizer, end_tokens(shape, tokenizer, cfg.rollout), prompt).splitlines()


def test_an_environment_is_shown_with_the_tokens_that_are_trained_on(tied_model, tmp_path):
    settings = [f"environment.name={tmp_path}/code.py:Stubborn", "environment.max_turns=2"]
    settings.append("rollout.max_completion_length=99")
    assert played(tied_model, tmp_path, *settings, answer=7) == [
        "row 0 of the data, with '7' for each turn of the model:",
        "  not trained: 69 tokens '<start>user\\nWhat is 1 + 1? Answer with only the number. Ready?"
        "<eos>\\n<start>assistant\\n'",
        "  trained: 2 tokens '7<eos>'",
        "  not trained: 26 tokens '\\n<start>user\\nNot 7.<eos>\\n<start>assistant\\n'",
        "  trained: 2 tokens '7<eos>'",
        "  the end: finish reason max_turns, reward 1",
    ]
    cut = played(tied_model, tmp_path, *settings, answer="7" * 100)
    assert cut[2].startswith("  trained: 92 tokens") and "reason length" in cut[3]
    failed = "\n".join(played(tied_model, tmp_path, *settings, answer="broken"))
    assert "\n  the end: prompt 0, sample 0: turn 1: " in failed
    assert failed.endswith("RuntimeError: out of order")


def test_each_training_sequence_of_an_agent_is_shown_after_its_context(tied_model, tmp_path):
    agent = f"agent.function={tmp_path}/code.py:rewrite"
    start, turn = "<start>user\\none<eos>\\n<start>assistant\\n", "  trained: 2 tokens '2<eos>'"
    lines = played(tied_model, tmp_path, agent, "rollout.max_completion_length=99")
    assert lines[1:6] == [
        "  sequence 1 of 3:",
        f"  not trained: 22 tokens '{start}'",
        turn,
        "  not trained: 23 tokens '\\n<start>user\\ntwo<eos>\\n<start>assistant\\n'",
        turn,
    ]
    assert lines[6] == "  sequence 2 of 3:" and lines[8] == turn
    assert lines[-1] == "  the end: finish reason stop, reward 0.25"
