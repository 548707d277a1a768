"""Lossless: with any drafter, in any batch, the engine writes what the target alone would have written.

Greedy in float32 is compared token by token with plain decoding and with transformers' `generate`. Sampling with
drafts that are point masses is compared token by token too: the randomness of a position is the row's own. Drafts
drawn from a q have no such test; their distribution is proved by enumeration in test_accept.py and tested on a real
model in test_lossless_slow.py.
"""

import json
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree
from paceline.draft import registry
from paceline.draft.methods.past_answer import PastAnswer
from paceline.engine.engine import Engine
from paceline.target.decoder import Decoder
from paceline.target.hf import HFTarget
from paceline.target.load import load, load_tokenizer
from tests import drafters, models, native, plain
from tests.pairs import paired
from tests.paths import DEVICE, source
from tests.plain import generate, texts, up_to
from tests.preempting import preempt_often

NEW = 16
COMPANY = {1: 2, 8: 8}
"""Batch size, and how many prompts are answered with it; the contract of drafters has more prompts than a batch."""

Answers = dict[tuple[int, ...], list[int]]
"""Whole texts by prompt."""


def registered():
    """Every lossless drafter a user can name without a checkpoint, and its variants. `mtp` needs its target's head."""
    infos = [registry.describe(name) for name in registry.names()]
    alone = [info for info in infos if info.checkpoint != "required" and info.lossless == "yes" and info.name != "mtp"]
    variants = [
        f"{info.name},{option.name}={choice}"
        for info in alone
        for option in info.options
        for choice in option.choices
        if choice != option.default
    ]
    return [*(info.name for info in alone), *variants, "sam+prompt-lookup", "jacobi,tree=0,retrieve=none"]


def drafter_of(name, answers):
    drafter = drafters.by_name(name, answers)
    if isinstance(drafter, PastAnswer):  # it drafts for prompts that it has seen: half of their answers are right
        for prompt, text in answers.items():
            answer = np.array(text[len(prompt) :])
            answer[len(answer) // 2] = 5
            drafter.answers.of("").remember(np.array(prompt), answer)
    return drafter


def worked(name, out):
    """A drafter that drafts nothing, or of which nothing is ever accepted, would prove nothing."""
    if name not in ("none", "prediction", "grammar"):  # two draft for requests that bring something
        assert sum(done.stats.draft_tokens for done in out) > 0
    accepts = ("oracle", "probes", "sam", "prompt-lookup", "hierarchy", "recycling", "jacobi", "past-answer")
    if name.startswith(accepts) and "vllm" not in name and "retrieve=none" not in name:
        assert sum(sum(done.stats.accepted[1:]) for done in out) > 0


# Every family --------------------------------------------------------------------------------------------------------


@cache
def family_world(family):
    """A random model of `family`, prompts of 1 to 60 tokens, and what transformers writes behind them.

    Random models have no favourite end token, so the one that is written most is made the end token: rows then end
    at different places, often inside a draft."""
    model = models.model(family).to(DEVICE)
    model.generation_config.eos_token_id = None
    rng = np.random.default_rng(1)
    prompts = [rng.integers(4, models.VOCAB_SIZE, n).tolist() for n in (23, 5, 34, 1, 60, 8)]
    free = [generate(model, prompt, NEW, ()) for prompt in prompts]
    late = [token for prompt, text in zip(prompts, free, strict=True) for token in text[len(prompt) + 6 :]]
    eos = (int(np.bincount(late).argmax()),)
    answers = {tuple(p): up_to(text, eos[0], len(p)) for p, text in zip(prompts, free, strict=True)}
    assert answers[tuple(prompts[0])] == generate(model, prompts[0], NEW, eos)
    assert len({len(text) - len(prompt) for prompt, text in answers.items()}) > 1, "all answers are equally long"
    target = native.of(model, eos=eos) if family in models.NATIVE else HFTarget(model, eos_token_ids=eos)
    return target, prompts, answers


ALIKE = ("llama1", "llama2", "llama-linear", "vicuna", "qwen2-window", "qwen2-tied", "qwen3-bias")
"""Families whose parts others have, too; that their logits are transformers' own is in test_decoder.py."""
EARLY = (
    "llama3", "mistral-window", "gemma3", "gemma4", "granite", "olmo2", "smollm3", "phi3", "qwen3-moe", "gpt-oss",
    *models.HYBRID,
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, "oracle tree", marks=[pytest.mark.slow] if family in ALIKE else [])
        for family in (*models.NATIVE, *models.FOREIGN)
    ]
    + [(family, "none") for family in ("llama3", "qwen2-window", "gpt2")]
    # Probes are more nodes of a tree to a target: one of each kind, and a window.
    + [(family, "probes") for family in ("llama3", "qwen2-window", "gpt2")]
    # Only the native decoder can go on from a self-drafter's states; in every batch below.
    + [
        pytest.param(family, "early exit", marks=[] if family in EARLY else [pytest.mark.slow])
        for family in models.NATIVE
    ],
)
def test_greedy_text_of_every_family_is_transformers_own(family, name):
    target, prompts, answers = family_world(family)
    every = []
    for batch, count, chunk in ((1, 2, 512), (4, 6, 40)):
        if batch == 1 and name == "early exit":
            continue
        engine = Engine(target, drafter_of(name, answers), max_batch=batch, prefill_chunk=chunk)
        out = engine.generate(prompts[-count:], SamplingParams(max_tokens=NEW))
        assert texts(prompts[-count:], out) == list(answers.values())[-count:]
        assert {done.finish_reason for done in out} <= {"stop", "length"}
        every += out
    worked(name, every)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sam", "recycling", "model:{draft}", "model:{draft},tree=9"])
@pytest.mark.parametrize("family", models.NATIVE)
def test_methods_write_the_text_of_every_family(family, name, tmp_path):
    """Prompts come twice, so that prefixes are reused and answers are known; in the batch, rows are preempted too."""
    target, prompts, answers = family_world(family)
    models.make(family, tmp_path)
    generator = torch.Generator().manual_seed(0)
    models.rewrite(tmp_path, lambda _, tensor: tensor + 0.01 * torch.randn(tensor.shape, generator=generator))
    for batch, chunk in ((1, 512), (5, 16)):
        engine = Engine(target, name.format(draft=tmp_path), max_batch=batch, prefill_chunk=chunk)
        if batch > 1:
            preempt_often(engine)
        for _ in range(2):
            out = engine.generate(prompts, SamplingParams(max_tokens=NEW))
            assert texts(prompts, out) == list(answers.values())
        assert sum(done.stats.draft_tokens for done in out) > 0
        assert sum(done.reused for done in out) > 0
        assert name == "sam" or sum(sum(done.stats.accepted[1:]) for done in out) > 0


# Exact, in bfloat16 --------------------------------------------------------------------------------------------------


@cache
def exact_world():
    """An exact bfloat16 model, prompts, and what plain decoding writes after each of them alone."""
    target = native.of(models.model("llama2"), torch.bfloat16, eos=())
    target.make_exact()
    rng = np.random.default_rng(2)
    prompts = [rng.integers(4, models.VOCAB_SIZE, n).tolist() for n in (70, 5, 34, 1, 61)]
    plain = Engine(target, max_batch=1)
    return target, prompts, {tuple(p): [*p, *plain.generate([p], EXACT)[0].tokens] for p in prompts}


EXACT = SamplingParams(temperature=0.8, max_tokens=NEW, seed=4)
"""Sampled answers tell more than greedy ones: any bit of a logit may change a token."""


@pytest.mark.skipif(DEVICE != "cpu", reason="exact needs a CPU")
@pytest.mark.parametrize("name", [*drafters.BY_NAME, "sam", "recycling", "ngram-pool", "jacobi"])
def test_exact_answers_in_bfloat16_are_plain_ones(name):
    """Drafts of every shape, and methods that ask the forward for more; which tokens are drafted does not matter."""
    target, prompts, answers = exact_world()
    out = Engine(target, drafter_of(name, answers), max_batch=4, prefill_chunk=32).generate(prompts, EXACT)
    assert texts(prompts, out) == list(answers.values())
    if "oracle" in name or "exit" in name:
        assert sum(done.stats.draft_tokens for done in out) > 0


# A trained model -----------------------------------------------------------------------------------------------------

SAMPLED = [
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9, max_tokens=NEW, seed=seed)
    if seed % 2
    else SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, max_tokens=NEW, seed=seed)
    for seed in range(8)
]


class Stories:
    """stories260K, prompts in its own language, and what transformers writes behind them, greedy and sampled."""

    def __init__(self, folder):
        self.target = load(folder, dtype="float32", device=DEVICE)
        self.tokenizer = load_tokenizer(folder)
        assert isinstance(self.target, Decoder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
        begun = [
            "Tom had a red ball. Tom had a red ball. Tom had a",
            "Lily and Ben went to the park. They saw a big dog. The dog was",
            "The cat sat on the mat. The cat sat on the",
            "The",
            "One day, a little girl named Lily found a needle in her room. She knew it was difficult to play with it",
            '"What is it?" said Tim. "It is a box," said Sue. "What',
            "Once upon a time",
            "Jack was sad. He lost his toy. His mom said",
        ]
        ends = self.target.eos_token_ids
        self.prompts = [self.tokenizer.encode(text) for text in begun]
        self.answers = {tuple(p): generate(model, p, NEW * 2, ends) for p in self.prompts}
        self.samples = {
            tuple(p): [*p, *plain.decode(model, p, wish, eos=ends).tokens]
            for p, wish in zip(self.prompts, SAMPLED, strict=True)
        }

    def engine(self, drafter, **kw):
        return Engine(self.target, drafter, tokenizer=self.tokenizer, **kw)


@pytest.fixture(scope="module")
def world(stories):
    return Stories(stories)


EVERY = [*registered(), *drafters.BY_NAME]


def batches(name):
    """Every batch size for a method; for a variant, whose rows are kept as the method's are, the larger one."""
    return {8: 8} if "=" in name else COMPANY


@pytest.mark.parametrize("name", EVERY)
def test_greedy_text_is_transformers_own(world, name):
    for batch, count in batches(name).items():
        chunk = 512 if batch == 1 else 24
        engine = world.engine(drafter_of(name, world.answers), max_batch=batch, prefill_chunk=chunk)
        prompts, answers = world.prompts[:count], list(world.answers.values())[:count]
        out = engine.generate(prompts, SamplingParams(max_tokens=NEW * 2))
        assert texts(prompts, out) == answers
        decode = world.tokenizer.decode
        assert [decode(p) + done.text for p, done in zip(prompts, out, strict=True)] == list(map(decode, answers))
        worked(name, out)


# The embedded model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chats(demo):
    """The demo model in float32, prompts as its users write them, and transformers' answers."""
    target, tokenizer = load(demo, dtype="float32", device=DEVICE), load_tokenizer(demo)
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32).to(DEVICE)
    lines = source("cli/demo-prompts-tiny.jsonl").read_text("utf-8").splitlines()
    asked = [*map(json.loads, lines[:2]), {"prompt": "Hello!"}, {"prompt": "Copy: one two one two one two one"}]
    prompts = [
        tokenizer.encode_chat(one.get("messages") or [{"role": "user", "content": one["prompt"]}]) for one in asked
    ]
    return target, prompts, {tuple(p): generate(model, p, NEW, target.eos_token_ids) for p in prompts}


@pytest.mark.parametrize("name", ["oracle tree", "sam", "recycling"])
def test_greedy_answers_of_the_demo_model_are_transformers_own(chats, name):
    """A second trained model, with a tokenizer and a template; every method, batch size and variant is above."""
    target, prompts, answers = chats
    engine = Engine(target, drafter_of(name, answers), max_batch=3, prefill_chunk=48)
    out = engine.generate(prompts, SamplingParams(max_tokens=NEW))
    assert texts(prompts, out) == list(answers.values())
    worked(name, out)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="how other processors add in bfloat16 is not known")
def test_bfloat16_attention_is_the_same_alone_and_in_a_draft(demo):
    """Bit for bit, whatever the length of the draft: this is what KEY_GRANULE is for."""
    target = load(demo, dtype="bfloat16", device=DEVICE)
    assert isinstance(target, Decoder)
    text = np.random.default_rng(0).integers(5, target.vocab_size, 90)
    logits = []
    for width in (1, 2, 7, 15):
        slot = target.add_row(len(text))
        target.verify([Segment.chunk(slot, text[:45], last=False)])
        target.commit(slot, range(45))
        rows = []
        for begin in range(45, 90, width):
            tree = DraftTree.chain(int(text[begin]), text[begin + 1 : begin + width])
            rows.append(target.verify([Segment.tree(slot, tree)]).logits)
            target.commit(slot, range(len(tree)))
        logits.append(torch.cat(rows))
        target.drop_row(slot)
    assert all(torch.equal(other, logits[0]) for other in logits[1:])


@pytest.mark.parametrize("name", EVERY)
def test_drafts_give_plain_samples_seed_for_seed(world, name):
    """In company that comes and goes; the samples that are compared were made one row at a time."""
    engine = preempt_often(world.engine(drafter_of(name, world.samples), max_batch=4))
    out = engine.generate(world.prompts, SAMPLED)
    assert texts(world.prompts, out) == list(world.samples.values())


@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (3, 2, 1)], ids=["chain", "tree"])
def test_drafts_of_the_same_noise_are_accepted_and_change_nothing(world, widths):
    prompts = world.prompts[:5]

    def answer(params, batch, every=1000):
        engine = world.engine(drafters.Bigrams(widths), max_batch=batch)
        return preempt_often(engine, every).generate(prompts, params)

    greedy = [world.answers[tuple(prompt)][: len(prompt) + NEW] for prompt in prompts]
    assert texts(prompts, answer(SamplingParams(max_tokens=NEW), 3)) == greedy
    alone = answer(SAMPLED[:5], 1)
    assert np.mean([done.mean_accepted_tokens for done in alone]) > 1.1
    for made in (alone, answer(SAMPLED[:5], 4, every=3)):
        assert texts(prompts, made) == list(world.samples.values())[:5]


@pytest.mark.parametrize(
    ("greedy", "name"), paired([True, False], ["none", "oracle tree", "early exit", "sam+prompt-lookup"])
)
def test_a_row_does_not_depend_on_its_batch_mates(world, name, greedy):
    rng = np.random.default_rng(3)
    prompt = world.prompts[5]
    wish = SamplingParams(max_tokens=NEW) if greedy else SAMPLED[1]
    (alone,) = world.engine("none").generate([prompt], wish)
    for _ in range(2):
        others = [world.prompts[i] for i in rng.permutation(8)[: rng.integers(1, 8)]]
        at = int(rng.integers(len(others) + 1))
        params = [SAMPLED[int(rng.integers(8))] for _ in range(len(others) + 1)]
        params[at] = wish
        batch, chunk = int(rng.integers(1, 9)), int(rng.integers(3, 60))
        engine = world.engine(drafter_of(name, world.answers), max_batch=batch, prefill_chunk=chunk)
        out = engine.generate([*others[:at], prompt, *others[at:]], params)
        assert out[at].tokens == alone.tokens


def test_a_drafter_that_is_always_right_saves_most_forwards(world):
    """The tests above would pass with drafts that are never used; this one would not."""
    out = world.engine(drafters.Right(world.answers)).generate(world.prompts, SamplingParams(max_tokens=33))
    assert [done.rounds for done in out] == [5] * len(out)  # 1 token from the prompt, then 8 a round
    assert [done.stats.accepted for done in out] == [[1, 0, 0, 0, 0, 0, 0, 4]] * len(out)
