"""Sessions on images of the row: what engines are sent, and what is trained on."""

import asyncio
import json
from contextlib import closing
from typing import NamedTuple

import pytest
import torch

from checkpoint_convert.tokenizer import load_tokenizer
from helpers.models.images import IMAGE, image_config, picture, tiny_vision_model
from helpers.models.tiny import EOS_ID
from megatron_grpo.agents.partners import Environments
from megatron_grpo.agents.rehearsal import AnswerOfRow, RehearsedAgents
from megatron_grpo.batch.branches import numbered_sequences
from megatron_grpo.batch.experience import Experience
from megatron_grpo.checkpoints.experience_file import OPEN, read_experience, write_experience
from megatron_grpo.config.agent import AGENT
from megatron_grpo.data.prompts import Prompt, load_prompts
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.group import features_of
from megatron_grpo.engines.request import SamplingParams
from parallel.packing import TokenSequence

NEWLINE = 3
"""What the template writes after a turn."""
AGENTS = """
import openai

async def ask(client, *messages):
    answer = await client.chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.model_dump(exclude_none=True)

def user(*urls, text="Which?", role="user"):
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": role, "content": [*images, {"type": "text", "text": text}]}

async def show(client, row):
    one, other = row["image"]
    turn = await ask(client, user(one))
    await ask(client, user(one), turn, user(other))
    await ask(client, user(other))
    await ask(client, user(other, one))
    await ask(client, user(text="and?"))
    return 1

async def be_refused(client, row):
    one, other = row["image"]
    turn = await ask(client, user(one))
    drawn, tools = "data:image/png;base64,AAAA", "images that tools make are not supported"
    for words, *messages in (
        ("none of the row's 2", user(drawn)),
        (tools, user(one), turn, user(drawn, role="tool")),
        ("a message of the assistant has an image", user(), user(one, role="assistant"), user()),
        ("more images than rollout.vllm.limit_mm_per_prompt.image 2", user(one, one, other)),
        ("writes <|image_pad|> 1 time for 0 images", user(text="<|image_pad|>")),
    ):
        try:
            await ask(client, *messages)
        except openai.BadRequestError as error:
            assert words in str(error), error
        else:
            assert False, words
    try:
        await client.completions.create(model="policy", prompt="<|image_pad|>")
    except openai.BadRequestError as error:
        assert "shows no image: use /v1/chat/completions" in str(error), error
        return 1
"""
SHOWN = [[0], [0, 1], [1], [1, 0], []]
"""Images of each turn's prompt of `show`, by their number in the row."""
SEEN = [[0, 1], [1], [1, 0], []]
"""Images of each branch."""
ENVIRONMENT = """
class Look:
    def reset(self, prompt, **_):
        return " Look closely."

    def step(self, text):
        return "And now?", 0.5, False
"""


class Recorder(AnswerOfRow):
    """Completes turns with the row's answer, and keeps the requests."""

    def __init__(self, *row):
        super().__init__(*row)
        self.bodies = []

    def submit(self, requests):
        self.bodies += [request.body for request in requests]
        super().submit(requests)


class Session(NamedTuple):
    prompt: Prompt
    features: dict
    requests: list[dict]
    sample: Sample


def play(folder, code: str, *partner: str) -> Session:
    """A session on a row with two images of one size; `code` is in the file PARTNER."""
    model, file = tiny_vision_model(folder / "model"), folder / "partner.py"
    for seed in (0, 1):
        picture(60, 90, seed).save(folder / f"{seed}.png")
    row = {"prompt": "Which?", "answer": "a", "image": ["0.png", "1.png"]}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    file.write_text(code)
    overrides = [each.replace("PARTNER", str(file)) for each in partner]
    cfg = image_config(model, folder, *overrides, "data.max_prompt_length=200")
    tokenizer, ends = load_tokenizer(model), [NEWLINE, EOS_ID]
    [prompt] = load_prompts(cfg, tokenizer, 512)
    router = Recorder(prompt, tokenizer, ends)
    params = SamplingParams(
        num_generations=1,
        policy_version=0,
        temperature=1.0,
        max_completion_length=200,
        stop_token_ids=ends,
        seed=0,
        series=0,
    )
    client = [router] if cfg.partner == AGENT else []
    make = RehearsedAgents if client else Environments
    with closing(router.loop), closing(make(cfg, tokenizer, ends, *client)) as partners:
        partners.wait_ready([prompt.row])
        features = router.loop.call(features_of([prompt]))[prompt.images]
        group = partners.groups(cfg)(prompt, params, 0, features)
        [sample] = router.loop.call(asyncio.wait_for(group.sample(router), 60))
    assert not sample.failure
    return Session(prompt, features, router.bodies, sample)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return play(tmp_path_factory.mktemp("agent"), AGENTS, "agent.function=PARTNER:show")


def test_an_environment_answers_every_turn_on_the_images_of_the_prompt(tmp_path):
    environment = "environment.name=PARTNER:Look", "environment.max_turns=3"
    prompt, features, requests, sample = play(tmp_path, ENVIRONMENT, *environment)
    assert [each["features"] for each in requests] == [features] * 3
    assert "Which? Look closely." in sample.prompt.text
    assert sample.prompt.images == prompt.images


def test_engines_see_the_images_of_each_turn_where_they_are(played):
    _, features, requests, _ = played
    for body, shown in zip(requests, SHOWN, strict=True):
        pads = [place for place, token in enumerate(body["token_ids"]) if token == IMAGE]
        if not shown:
            assert not pads and "features" not in body
            continue
        found = body["features"]
        places = found["mm_placeholders"]["image"]
        assert pads == [each["offset"] + i for each in places for i in range(each["length"])]
        for name in ("mm_hashes", "kwargs_data"):
            assert found[name]["image"] == [features[name]["image"][number] for number in shown]


def test_every_branch_is_trained_on_with_the_images_that_it_saw(played):
    prompt, _, _, sample = played
    whole = TokenSequence(
        tokens=torch.tensor([*sample.prompt.token_ids, *sample.completion_ids]),
        num_prompt_tokens=len(sample.prompt.token_ids),
        advantage=1.0,
        loss_weight=1.0,
        rollout_logprobs=torch.tensor([*sample.logprobs]),
        images=sample.prompt.images,
    )
    of_row = prompt.images.read().patches.chunk(2)  # of one size
    branches = numbered_sequences([sample], [whole])
    for branch, seen in zip(branches.values(), SEEN, strict=True):
        pads = (branch.tokens == IMAGE).nonzero()[:, 0]
        if not seen:
            assert branch.images is None and not len(pads)
            continue
        images = branch.images.read()
        assert torch.equal(images.tokens, pads)
        assert torch.equal(images.patches, torch.cat([of_row[number] for number in seen]))


def test_a_saved_sample_keeps_the_places_of_its_images(played, tmp_path):
    prompt, _, _, sample = played
    values = [torch.ones(1) for _ in range(3)]
    write_experience(tmp_path, Experience([sample], [{"agent": 5.0}], *values), OPEN)
    [read] = read_experience(tmp_path, [prompt], OPEN).samples
    assert read.prompt == sample.prompt and read.prompt.images.places != prompt.images.places


def test_images_that_are_none_of_the_row_are_refused_in_words(tmp_path):
    assert play(tmp_path, AGENTS, "agent.function=PARTNER:be_refused").sample.dialogue_reward == 1
