import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import PreTrainedTokenizerBase

from megatron_grpo.config.data import OWN_TEMPLATE_ARGUMENTS, WeightedPath
from megatron_grpo.config.file import OTHER_NAMES, dump_config, load_config
from megatron_grpo.config.grpo import LOSS_TYPES
from megatron_grpo.config.trackers import WandbConfig

pytestmark = pytest.mark.fast

CONFIGS = Path(__file__).parents[3] / "configs"
DEMO = CONFIGS / "demo_smollm2_135m.yaml"
IN_FLIGHT = (
    "rollout.in_flight_updates=true + rollout.max_staleness=2"
    " + grpo.rollout_importance_sampling_mode=token_truncate"
)


def refusal(*overrides: str, path: Path = DEMO) -> str:
    """The error message of the demo's config with `overrides`."""
    with pytest.raises(ValueError) as refused:
        load_config(path, overrides)
    return str(refused.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_its_dump_loads_back_equal(path, tmp_path):
    config = load_config(path)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_reading_a_config_imports_no_torch():
    code = (
        "import sys; from pathlib import Path; "
        "from megatron_grpo.config.file import load_config; "
        f"load_config(Path({str(DEMO)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, cwd=CONFIGS.parent)


def test_overrides_are_yaml_values_and_reach_nested_pass_through_tables():
    config = load_config(
        DEMO,
        [
            "optimizer.lr=3E-05",
            "data.answer_column=null",
            "data.system_prompt=a = b",
            "rollout.vllm.compilation_config.level=3",
            "reward.functions=[exact, {name: format, weight: 0.5, arguments: {pattern: a+}}]",
        ],
    )
    assert config.optimizer.lr == 3e-5
    assert config.data.answer_column is None
    assert config.data.system_prompt == "a = b"
    assert config.rollout.vllm == {"compilation_config": {"level": 3}}
    assert [(f.name, f.weight) for f in config.reward.functions] == [
        ("exact", 1.0),
        ("format", 0.5),
    ]


def value(override: str) -> object:
    """The value of the override's key in the loaded demo config."""
    found: object = load_config(DEMO, [override])
    for name in override.partition("=")[0].split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


@pytest.mark.parametrize(
    "text",
    [
        *("Give the number after ####", "# Task", "Answer: yes or no", "[INST] say", "- one"),
        *("no", "010", "1e5", "2026-11-29", "trailing ", " leading", "a\n# b\tc", "a: b\nc: d"),
        *("&x y", "*x", "!x y", "% y", "@x", "`x`", "{a}.b", "?", "---", "|", "'a' and 'b'", '"a'),
        *("\x07", "a\r\n\u2028b", "\x85"),
    ],
)
def test_a_key_of_type_text_takes_its_value_literally_and_so_does_its_dump(text, tmp_path):
    for key in ("data.system_prompt", "data.split", "data.path", "wandb.name"):
        assert value(f"{key}={text}") == text
    assert value(f"train.run_dir={text}") == Path(text)
    dumped = tmp_path / "config.yaml"
    config = load_config(DEMO, [f"wandb.name={text}", f"train.run_dir={text}"])
    dumped.write_text(dump_config(config), encoding="utf-8")
    assert load_config(dumped) == config


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("data.system_prompt='null'", "null"),
        ('data.system_prompt="a #b\\n"', "a #b\n"),
        ("data.system_prompt='it''s'", "it's"),
        ("data.system_prompt=", None),
        ("data.system_prompt=~", None),
        ("lora.target_modules=[no, 010]", ("no", "010")),
        ("rollout.stop=[yes, 1.10, '#', =, \"\\n\"]", ("yes", "1.10", "#", "=", "\n")),
        ("wandb={name: 010, tags: [2026-11-29]}", WandbConfig(name="010", tags=("2026-11-29",))),
        ("data.path=[{path: 010, weight: 1}]", (WeightedPath(path="010", weight=1),)),
        ("train.tensorboard=yes", True),
        ("rollout.vllm.x=-1e3", -1000.0),
        ("data.chat_template_kwargs.date=2026-11-29", "2026-11-29"),
        ("rollout.vllm.x='010'", "010"),
        ("rollout.vllm.x={no: 1, 010: 2, <<: 3}", {"no": 1, "010": 2, "<<": 3}),
        ("rollout.vllm.x=|\n  a\n  b", "a\nb"),
    ],
)
def test_quotes_null_lists_and_tables_are_yaml_with_texts_as_they_stand(override, meant):
    assert value(override) == meant


def test_defaults_that_follow_other_keys_are_resolved():
    config = load_config(
        CONFIGS / "gsm8k_smollm2_135m.yaml",
        [
            "parallel.tensor_parallel_size=3",
            "rollout.base_urls=[http://localhost:1, http://localhost:2]",
        ],
    )
    assert load_config(DEMO, ["grpo.epsilon=0.1"]).grpo.epsilon_high == 0.1
    assert config.parallel.sequence_parallel is True
    assert config.rollout.num_engines == 2
    assert load_config(DEMO).parallel.sequence_parallel is False


def test_a_held_out_set_inherits_from_the_evaluation_then_the_training(tmp_path):
    config = load_config(
        DEMO,
        [
            "data.system_prompt=Add.",
            "reward.timeout=5",
            "eval.reward.functions=[exact]",
            "eval.k=[1,2]",
            "eval.num_generations=2",
            "eval.temperature=0.6",
            "eval.sets.math500={data: {path: math500.jsonl}, num_generations: 4}",
            "eval.sets.aime24.data={path: aime24.jsonl, answer_column: solution}",
            "eval.sets.aime24.temperature=1.0",
            "eval.sets.aime24.k=[2]",
            "eval.sets.aime24.reward.timeout=7",
        ],
    )
    assert list(config.eval.named_sets) == ["math500", "aime24"]
    math, aime = config.eval.named_sets.values()
    assert (math.data.path, aime.data.path) == ("math500.jsonl", "aime24.jsonl")
    assert (math.data.answer_column, aime.data.answer_column) == ("answer", "solution")
    assert (math.data.system_prompt, math.data.shuffle) == ("Add.", False)
    assert (math.num_generations, aime.num_generations) == (4, 2)
    assert (math.k, aime.k) == ((1, 2), (2,))
    assert (math.temperature, aime.temperature) == (0.6, 1.0)
    assert (math.reward.timeout, aime.reward.timeout) == (5.0, 7.0)
    assert [f.name for s in (math, aime) for f in s.reward.functions] == ["exact", "exact"]
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_without_sets_the_evaluation_is_one_and_inherits_from_the_training():
    assert load_config(DEMO).eval.data is None
    config = load_config(DEMO, ["data.path=openai/gsm8k", "eval.data.split=test"])
    data = config.eval.data
    assert (data.path, data.split, data.shuffle) == ("openai/gsm8k", "test", False)
    assert load_config(DEMO, ["eval.data={}", "eval.num_generations=8"]).eval.k == (1, 8)


def test_an_environment_alone_may_judge_an_evaluation():
    game = ["environment.name=mine.py:Game", "eval.data={}"]
    config = load_config(DEMO, [*game, "eval.reward.functions=[]"])
    assert config.eval.reward.functions == ()
    load_config(DEMO, [*game, "reward.functions=[]"])
    load_config(DEMO, [*game, "eval.pass_threshold=1.5"])
    assert "environment * 0.5: set eval.pass_threshold to" in refusal(
        *game, "eval.reward.functions=[]", "environment.weight=0.5"
    )


SETS = [
    "eval.sets.math500={data: {}, num_generations: 4, reward: {timeout: 5}}",
    "eval.sets.aime24={data: {}, num_generations: 32, reward: null}",
]


def test_a_default_that_each_set_has_itself_is_refused():
    message = refusal(*SETS, "eval.num_generations=-5")
    assert "eval.num_generations does nothing, as each of eval.sets (math500, aime24)" in message
    assert "use eval.sets.NAME.num_generations" in message
    assert "eval.sets.NAME.reward.timeout" in refusal(*SETS, "eval.reward.timeout=7")
    config = load_config(DEMO, [*SETS, "eval.reward.functions=[format]", "eval.top_p=0.9"])
    math, aime = config.eval.named_sets.values()
    assert ([f.name for f in math.reward.functions], aime.reward) == (["format"], None)
    assert (math.top_p, aime.top_p) == (0.9, 0.9)


def test_evaluations_of_a_file_are_switched_off_as_the_refusal_says(tmp_path):
    path = tmp_path / "evaluated.yaml"
    path.write_text(DEMO.read_text() + "\neval: {data: {split: test}, num_generations: 4}\n")
    assert "or set eval={} to evaluate nothing" in refusal("eval.data=null", path=path)
    assert load_config(path, ["eval={}"]).eval == load_config(DEMO).eval


def test_a_set_that_is_null_is_left_out():
    config = load_config(DEMO, [*SETS, "eval.sets.aime24=null"])
    assert list(config.eval.named_sets) == ["math500"]
    none = [*SETS, "eval.sets.math500=null", "eval.sets.aime24=null"]
    assert load_config(DEMO, none).eval == load_config(DEMO).eval
    assert load_config(DEMO, [*none, "eval.data={}"]).eval.named_sets.keys() == {""}


def test_a_set_may_be_called_by_a_number(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(DEMO.read_text() + "eval: {sets: {2024: {data: {}}, 2025: {data: {}}}}\n")
    config = load_config(path, ["eval.sets.2024.top_p=0.9", "eval.sets.2025=null"])
    assert {name: each.top_p for name, each in config.eval.named_sets.items()} == {"2024": 0.9}


def test_defaults_that_no_set_uses_are_not_checked():
    """`eval.k` is above `eval.num_generations`, which no set uses."""
    overrides = ["eval.k=[8]", "eval.sets.a={data: {}, num_generations: 8}"]
    assert load_config(DEMO, overrides).eval.named_sets["a"].k == (8,)


def test_unknown_keys_of_the_file_are_listed_together(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(DEMO.read_text() + "wandbb:\n  project: x\nseed: 1\n")
    assert "did you mean 'wandb.project'" in refusal(path=path)
    assert "did you mean 'train.seed'" in refusal(path=path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("# nothing yet\n", "is empty: a config needs the sections model, data, train, optimizer"),
        ("- model\n", "holds list, no sections: a config needs the sections model, data, "),
        ("model:\n  path: a\n  dtype: b\n  path: c\n", "'path' is given twice"),
        ("model: [1", "not valid YAML"),
        ("model:\n\tpath: a\n", "is indented with spaces, not tabs"),
        (b"model: {path: mod\xe8le}\n", "config.yaml is not in UTF-8"),
        (None, "does not exist"),
    ],
    ids=["empty", "a list", "a key given twice", "no YAML", "tabs", "Latin-1", "missing"],
)
def test_a_file_that_is_no_config_is_refused_with_the_reason(text, error, tmp_path):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert error in refusal(path=path)


def test_a_folder_is_no_config(tmp_path):
    assert "is a folder: give a YAML file" in refusal(path=tmp_path)


def test_keys_of_other_trainers_are_answered_with_existing_keys():
    others = yaml.safe_load(OTHER_NAMES.read_text())
    keys = [re.match(r"[\w.]+\w", meaning)[0] for meaning in others.values()]
    [message] = refusal("unknown=1", *(f"{key}=1" for key in keys)).splitlines()
    assert "unknown config key 'unknown'" in message


SECTIONS = "the sections are model, lora, data, train, "
IN_ONE_LINE = [
    # Unknown keys, and the suggested one.
    ("optimiser.lr=1", "'optimiser.lr'", "optimizer.lr"),
    ("lr=1", "'lr'", "optimizer.lr"),
    ("eval.data.splt=1", "'eval.data.splt'", "eval.data.split"),
    ("eval.sets.a.data.splt=1", "'eval.sets.a.data.splt'", "eval.sets.a.data.split"),
    ("eval.sets.a.interval=1", "'eval.sets.a.interval'", "eval.interval"),
    ("grpo.eps=1", "'grpo.eps'", "section grpo has no such key"),
    ("train.total_steps=1", "'train.total_steps'", "section train has no such key"),
    ("peft.rank=1", "'peft.rank'", SECTIONS),
    ("num_layers=1", "'num_layers'", SECTIONS),
    # Keys of other trainers.
    ("actor_rollout_ref.rollout.n=1", "'actor_rollout_ref.rollout.n': here it is grpo.num_gen"),
    ("custom_reward_function.path=1", "here it is reward.functions, as file.py:function"),
    ("grpo.rollout_is_threshold=1", "here it is grpo.rollout_importance_sampling_threshold"),
    ("grpo.kl_loss_type=1", "here it is grpo.kl_estimator"),
    ("train.learning_rate=1", "'train.learning_rate': here it is optimizer.lr"),
    ("actor_rollout_ref.actor.optim.lr=1", "did you mean 'optimizer.lr'?"),
    ("trainer.nnodes=1", "docs/coming-from.md has names of other trainers"),
    # Wrong values, and the expected type or range.
    ("optimizer.lr=fast", "optimizer.lr", "'fast'", "valid number"),
    ("train.num_steps=0", "train.num_steps", "0", "greater than 0"),
    ("grpo.loss_type=ppo", "grpo.loss_type", "'ppo'", ", ".join(LOSS_TYPES)),
    ("model.path=null", "model.path", "None", "expected a path"),
    ("model.dtype=no", "model.dtype", "'no'", "'bfloat16' or 'float32'"),
    ("train=3", "train", "3", "expected a table of keys"),
    ("rollout.base_urls=http://x", "rollout.base_urls", "expected a list"),
    ("train.offload=weights", "train.offload 'weights'", "or a list of gradients, optimizer"),
    ("train.offload=[weights,moments]", "[weights, moments] has 'moments'", "a list of"),
    ("train.offload=[weights,weights]", "has weights twice"),
    ("optimizer.lr=.nan", "optimizer.lr", "finite"),
    (
        "reward.functions=[{name: exact, wieght: 2}]",
        *("unknown config key 'reward.functions.0.wieght'", "did you mean 'weight'"),
    ),
]


@pytest.mark.parametrize(("override", "parts"), [(row[0], row[1:]) for row in IN_ONE_LINE])
def test_load_config_refuses_in_one_line_with_what_is_expected(override, parts):
    message = refusal(override)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("rollout.stop=[a #b]", "drops the comment '#b]'"),
        ("rollout.stop=####", "drops the comment '####'"),
        ("wandb={name: run #3}", "drops the comment '#3}'"),
        ("train.num_steps=3 # for now", "drops the comment '# for now'"),
        ("rollout.vllm.x=fp8 # c", "drops the comment '# c'"),
        ("rollout.vllm.x=| # c\n  a", "drops the comment '# c'"),
        ("data.system_prompt='a' # c", "drops the comment '# c'"),
        ("data.system_prompt='a\nb'", "joins the lines of"),
        ("rollout.vllm.x=a\nb", "joins the lines of"),
        ("rollout.stop=[&a b]", "takes '&a' for its own syntax"),
        ("rollout.vllm.x=?", "takes '?' for its own syntax"),
        ("train.seed=010", "reads 010 as 8: write 8 if that is meant"),
        ("eval.k=[1, 0x10]", "reads 0x10 as 16"),
        ("train.seed=1:30", "reads 1:30 as 90"),
        ("rollout.vllm={a: [1_000]}", "reads 1_000 as 1000"),
        ("environment.arguments.x=no", "reads no as false: write false if"),
        ("rollout.stop=[a", "not valid YAML: expected ',' or ']'"),
        ("rollout.vllm.x=\x07", "not valid YAML: unacceptable character #x0007"),
        ("rollout.vllm.x={{a}}", "a table's keys are names"),
        ("data.system_prompt=\udcff", "not in UTF-8"),
    ],
)
def test_an_override_that_yaml_would_silently_change_is_refused_in_one_line(override, error):
    message = refusal(override)
    assert message.startswith(f"override {override!r}") and error in message
    assert "\n" not in message


def test_a_password_in_an_address_is_refused_and_not_repeated():
    message = refusal("rollout.base_urls=[http://me:geheim@node7:8000]")
    assert "node7 has a user in it" in message
    assert "geheim" not in message


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`, and set model.path="),
        ("models/Qwen3-0.6B", "OWNER/NAME --local-dir models/Qwen3-0.6B`"),
    ],
    ids=["a name on the hub", "a folder"],
)
def test_a_missing_model_is_named_with_the_command_that_downloads_it(
    path, name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    model = load_config(DEMO, [f"model.path={path}"]).model
    with pytest.raises(ValueError, match="is not a folder") as refused:
        model.check_folder()
    assert str(refused.value).startswith(f"model.path {tmp_path / path} ")
    assert f"hf download {name}" in str(refused.value)


def test_a_plan_needs_only_the_config_of_a_model(tmp_path):
    model = load_config(DEMO, [f"model.path={tmp_path}"]).model
    with pytest.raises(ValueError, match=r"only this file.*OWNER/NAME config\.json --local-dir"):
        model.check_folder(only_config=True)
    (tmp_path / "config.json").touch()
    model.check_folder(only_config=True)


def test_missing_key_is_named_with_its_meaning(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(DEMO.read_text().replace("  lr: 3e-5\n", "  weight_decay: 0.0\n"))
    message = "config key optimizer.lr is missing. Peak learning rate, at most 1."
    assert refusal(path=path) == message


HALF = "model.dtype=bfloat16"
SHORT_FORMS = {"HALF": HALF, "PRECISE": f"{HALF} + optimizer.use_precision_aware_optimizer=true"}
REFUSED = [
    ("train.num_epochs=1", "train.num_steps is 15, with num_epochs: give either"),
    ("train.num_steps=null", "train.num_steps is missing: give either"),
    ("data.path=null", "config key data.path = None: input should be a valid string"),
    ("data.path=[a.jsonl]", "config key data.path.0 = 'a.jsonl': expected a table of keys"),
    ("data.path=[]", "data.path is empty: name a file, a folder or a data set"),
    ("data.path=[{path: a.jsonl}]", "config key data.path.0.weight is missing"),
    ("data.path=[{path: a, weight: 0.5}]", "data.path.0.weight = 0.5: input should be a"),
    ("data.path=[{path: a, wieght: 1}]", "did you mean 'weight'?"),
    (
        "data.path=[{path: a, weight: 2}] + eval.data.split=test",
        "eval: data.path is a list, whose weights are for training: give one path",
    ),
    ("rollout.top_p=0.9", "top_p 1.0"),
    ("rollout.top_k=50", "top_k -1"),
    ("optimizer.lr=1e5", "optimizer.lr 100000: with AdamW"),
    ("optimizer.lr_warmup_steps=15", "at most 14"),
    ("optimizer.min_lr=1", "at most 3e-05"),
    ("optimizer.min_lr=1e-6", "use cosine or linear"),
    ("optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_steps"),
    (
        "optimizer.lr_decay_style=WSD + optimizer.lr_warmup_steps=5 "
        "+ optimizer.lr_wsd_decay_steps=11",
        "use at most 10",
    ),
    (
        "PRECISE + optimizer.exp_avg_sq_dtype=bfloat16 + optimizer.adam_beta2=0.999",
        "use at most 0.99609375, or optimizer.exp_avg_sq_dtype=float32",
    ),
    ("train.save_interval=10 + train.keep_every=25", "set it to 30"),
    ("grpo.num_generations=1", "at least 2"),
    ("grpo.loss_type=cispo", "at least 1, such as 5.0"),
    ("grpo.delta=1.2", "such as 2.0"),
    ("grpo.loss_type=luspo", "importance_sampling_level=sequence"),
    (
        "grpo.advantage_estimator=reinforce_plus_plus + grpo.num_generations=1"
        " + grpo.dynamic_sample=true",
        "at least 2 generations",
    ),
    ("grpo.dynamic_sample=true + grpo.dynamic_sample_reward=exact", "use last_number, or null"),
    ("reward.clip_range=[1, 0]", "the lower bound first"),
    (
        "eval.data={} + eval.pass_threshold=1 + eval.reward.clip_range=[0, 0.5]",
        "eval.pass_threshold 1.0 is above all rewards",
    ),
    ("rollout.quantization=int4", "'int8'"),
    ("rollout.quantization=nvfp4", "nvfp4 is for exports alone (train.export_quantization)"),
    (
        "grpo.beta=0.1 + grpo.advantage_estimator=rloo + grpo.kl_estimator=k3",
        "kl_estimator k3 in the reward",
    ),
    ("grpo.beta=0.1 + grpo.kl_estimator=k1", "k2 or k3"),
    ("rollout.base_urls=[http://localhost:1] + rollout.num_engines=3", "set it to 1"),
    ("rollout.base_urls=[node7]", "http://host:8000"),
    ("rollout.async_generate=true", "token_truncate"),
    ("rollout.stop=['']", "empty string"),
    (
        "rollout.engine=sglang + rollout.data_parallel_size=4 + rollout.sglang.ep_size=2",
        "rollout.data_parallel_size 4), which then have whole experts: set it to one of these",
    ),
    (
        "rollout.enable_sleep_mode=true + rollout.async_generate=true",
        "rollout.max_staleness=1 does not go",
    ),
    ("rollout.async_generate=true + rollout.max_staleness=2", "leave out rollout.async_generate"),
    (f"{IN_FLIGHT} + rollout.over_sampling=3.5", "at most 3"),
    ("reward.functions=[]", "name at least 1"),
    ("reward.functions=exact", "is a list"),
    ("reward.functions=[a.py:f, b.py:f]", "f 2 times"),
    ("environment.name=Game", "form file.py:ClassName"),
    (
        "environment.name=mine.py:Game + reward.functions=[mine.py:environment]",
        "rename the function",
    ),
    ("data.chat_template_kwargs.tools=[]", "kwargs.tools is reserved"),
    ("data.chat_template_kwargs.strftime_now=x", "kwargs.strftime_now is reserved"),
    ("data.date=yesterday", "data.date 'yesterday' is no time in ISO 8601"),
    ("data.date=''", "data.date '' is no time in ISO 8601"),
    (
        r'rollout.stop=["\ud83d"]',
        "config key 'rollout.stop' = ['\\ud83d']: half of a surrogate pair",
    ),
    (r'data.system_prompt="a\udce9"', "config key 'data.system_prompt' = 'a\\udce9': half"),
    (r'rollout.vllm={"\ud83d": .nan}', "half of a surrogate pair"),
    ("eval.k=[1,4,8]", "eval: k 4"),
    ("eval.temperature=0 + eval.num_generations=4", "use num_generations 1"),
    ("eval.temperature=0.001", "use 0, or at least 0.01"),
    ("eval.top_k=0", "eval: top_k 0"),
    ("eval.data.shuffle=true", "eval: data.shuffle"),
    ("eval.interval=5", "eval.interval does nothing without eval.data"),
    ("eval.data={} + eval.reward.functions=[]", "eval.reward.functions is empty"),
    ("eval.data={} + environment.name=mine.py:Game", "environment * 1: set eval.pass_threshold to"),
    ("eval.data={} + eval.sets.a.data={}", "eval.sets.NAME.data"),
    ("eval.sets={a/b: {data: {}}}", "the name 'a/b'"),
    ("eval.sets.a.k=[1]", "give eval.sets.a.data.path=FILE"),
    ("eval.sets.a=3", "eval.sets.a = 3"),
    ("eval.sets.a.data={} + eval.k=[2]", "eval.sets.a: k 2"),
    ("train.num_steps.x=1", "'num_steps' is a value"),
    ("train.num_steps", "key.sub=value"),
    ("train.seed=[1", "not valid YAML"),
]


def test_deepep_is_refused_for_a_number_of_ranks_without_settings():
    flex = "model.megatron.moe_token_dispatcher_type=flex"
    ranks = ["parallel.data_parallel_size=12", "parallel.expert_parallel_size=12"]
    assert "8, 16, 24, 32" in (text := refusal(flex, *ranks)) and "expert_tensor(1) = 12" in text
    load_config(DEMO, [flex, *ranks, "model.megatron.moe_flex_dispatcher_backend=hybridep"])
    load_config(DEMO, [flex, *(key.replace("12", "24") for key in ranks)])


@pytest.mark.parametrize(("overrides", "word"), REFUSED)
def test_values_that_do_not_go_together_are_refused(overrides, word):
    for name, override in SHORT_FORMS.items():
        overrides = overrides.replace(name, override)
    assert word in refusal(*overrides.split(" + "))


def test_an_environment_is_a_term_of_the_reward_and_may_be_the_only_one():
    environment = ["environment.name=mine.py:Game", "environment.arguments.size=3"]
    config = load_config(DEMO, [*environment, "reward.functions=[]", "environment.weight=2.0"])
    assert config.environment.arguments == {"size": 3}
    assert [(term.label, term.weight) for term in config.reward_terms] == [("environment", 2.0)]
    config = load_config(DEMO, [*environment, "reward.functions=[exact]"])
    assert [term.label for term in config.reward_terms] == ["exact", "environment"]
    assert load_config(DEMO).reward_terms == load_config(DEMO).reward.functions


LONG = "{name: soft_overlong, arguments: {soft_max_length: 16, soft_cache_length: 4}}"
COSINE = "{name: cosine, arguments: {cosine_max_len: 16}}"


@pytest.mark.parametrize(
    ("functions", "judge"),
    [
        (f"[{COSINE}]", "math_answer"),
        (f"[repetition, demo/rewards.py:last_number, {LONG}]", "demo/rewards.py:last_number"),
        ("[judge, exact]", "exact"),
    ],
)
def test_a_shaped_reward_judges_an_evaluation_only_if_configured(functions, judge):
    shaped = f"reward.functions={functions}"
    message = refusal(shaped, "eval.data.path=test.jsonl")
    assert f"set eval.reward.functions=[{judge}], or eval.pass_threshold to the lowest" in message
    load_config(DEMO, [shaped])
    load_config(DEMO, [shaped, "eval.data.path=test.jsonl", "eval.pass_threshold=1.0"])
    load_config(DEMO, [shaped, "eval.data.path=test.jsonl", f"eval.reward.functions=[{judge}]"])
    # Its functions are still those of training.
    assert message == refusal(shaped, "eval.data.path=test.jsonl", "eval.reward.timeout=120")
    judged = "eval.sets.one={data: {}, pass_threshold: 0.5}"
    message = refusal(shaped, judged, "eval.sets.two.data={}")
    assert f"set eval.sets.two.reward.functions=[{judge}], or eval.sets.two.pass_thr" in message
    load_config(DEMO, [shaped, judged, "eval.sets.two.data={}", "eval.pass_threshold=1.0"])


def test_a_function_of_weight_0_shapes_no_reward():
    watched = "reward.functions=[exact, {name: repetition, weight: 0.0}]"
    load_config(DEMO, [watched, "eval.data.path=test.jsonl"])


def test_arguments_of_transformers_are_no_variables_of_a_chat_template():
    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert taken.keys() - {"self", "kwargs"} <= OWN_TEMPLATE_ARGUMENTS


@pytest.mark.parametrize(
    ("overrides", "need"),
    [
        (["grpo.dynamic_sample_reward=exact"], "grpo.dynamic_sample=true"),
        (["grpo.loss_type=sapo", "grpo.epsilon=0.1"], "that clips below, such as dapo"),
        (["grpo.loss_type=vespo", "grpo.epsilon_high=0.3"], "that clips, such as dapo"),
        (["grpo.sapo_temperature_neg=2.0"], "grpo.loss_type=sapo"),
        (["grpo.loss_type=sapo", "grpo.vespo_k_neg=2.0"], "grpo.loss_type=vespo"),
        (["grpo.ref_model_sync_steps=9", "grpo.beta=0.1"], "grpo.sync_ref_model=true"),
        (["grpo.kl_estimator=k2"], "grpo.beta"),
        (["grpo.kl_horizon=9", "grpo.beta=0.1"], "grpo.kl_target"),
        (
            ["grpo.rollout_importance_sampling_threshold=5.0"],
            "grpo.rollout_importance_sampling_mode",
        ),
        (["grpo.rollout_rs_threshold_lower=0.9"], "grpo.rollout_rs"),
        (["optimizer.lr_wsd_decay_style=linear"], "optimizer.lr_decay_style=WSD"),
        (["optimizer.lr_wsd_decay_steps=2"], "optimizer.lr_decay_style=WSD"),
        (["optimizer.muon_momentum=0.9"], "optimizer.optimizer=muon"),
        (["optimizer.optimizer_offload_fraction=0.5"], "optimizer.optimizer_cpu_offload=true"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_with_its_default(overrides, need):
    hint = re.fullmatch(
        r"\w+.\w+=\S+ does nothing without (.*): set that, or (\S+)", refusal(*overrides)
    )
    assert need in hint[1]
    key = hint[2].partition("=")[0]
    load_config(DEMO, [o for o in overrides if not o.startswith(f"{key}=")] + [hint[2]])


def test_an_estimators_default_may_be_idle():
    rloo = load_config(DEMO, ["grpo.advantage_estimator=rloo"])
    assert (rloo.grpo.kl_in_reward, rloo.grpo.beta) == (True, 0.0)
    load_config(DEMO, ["grpo.advantage_estimator=rloo", "grpo.kl_in_reward=false"])
