"""Lossless on trained models, at length: sampled text has the target's distribution, and greedy text is its own on
the questions of Spec-Bench. Twenty minutes of a core, half of them the greedy text:
`pytest -m slow -n 0 tests/test_lossless_slow.py`.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.core.sampling import SamplingParams, probabilities
from paceline.draft import registry
from paceline.engine.engine import Engine
from paceline.target.load import load, load_tokenizer
from tests import drafters
from tests.lossless_statistics import fit
from tests.paths import DEVICE, REPOSITORY
from tests.plain import generate
from tests.spec_bench import encode, parting, questions

pytestmark = pytest.mark.slow

# The distribution ----------------------------------------------------------------------------------------------------

SAMPLES = 20_000
DEPTH = 3
RARE = 2e-4
"""Beginnings less probable than this are not looked into: all that begins so is one outcome."""
WARMER = 1.25
"""A temperature that is off by this much must be noticed."""

Text = tuple[int, ...]


@torch.inference_mode()
def law(model, prompt, params, like=()):
    """Probability of every answer of DEPTH tokens, by forwards of transformers over every beginning.

    like  the outcomes of another law; the same ones are told apart, and what cannot be one of them is left out."""
    wanted = {text[:n] for text in like for n in range(1, DEPTH + 1)}
    outcomes = {}
    begun = {(): 1.0}
    while begun:
        texts = [np.array([*prompt, *begin]) for begin in begun]
        logits = torch.cat([model(torch.from_numpy(np.stack(part))).logits[:, -1] for part in parts(texts, 512)])
        after = probabilities(logits.double(), params, texts).numpy()
        longer = {}
        for (begin, probability), following in zip(begun.items(), after, strict=True):
            for token in np.flatnonzero(following).tolist():
                longer[(*begin, token)] = probability * float(following[token])
        if like:
            longer = {text: p for text, p in longer.items() if text in wanted}
            begun = {text: p for text, p in longer.items() if text not in like}
        else:
            begun = {text: p for text, p in longer.items() if p >= RARE and len(text) < DEPTH}
        outcomes |= {text: p for text, p in longer.items() if text not in begun}
    return outcomes


def parts(items, size):
    """`items` in lists of at most `size`."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def counted(answers, outcomes):
    """How often each outcome was drawn; an answer that is none of them is an error."""
    index = {text: i for i, text in enumerate(outcomes)}
    counts = np.zeros(len(outcomes))
    for tokens in answers:
        shortest = next(n for n in range(1, DEPTH + 1) if tuple(tokens[:n]) in index)
        counts[index[tuple(tokens[:shortest])]] += 1
    return counts


def coupled(widths):
    return lambda: drafters.Bigrams(widths)


LOOP = "Tom had a red ball. Tom had a big red ball. Tom had a"
CASES = {
    "chain": (coupled((1, 1, 1)), "Tom", {"temperature": 1.0}),
    "chain, warped": (coupled((1, 1, 1)), "The", {"temperature": 0.7, "top_k": 30, "top_p": 0.9}),
    "tree": (coupled((4, 2, 1)), "Tom", {"temperature": 0.8, "top_k": 20}),
    "sam": (lambda: registry.create("sam"), LOOP, {"temperature": 0.9}),
    "recycling": (lambda: registry.create("recycling,tree=16"), LOOP, {"temperature": 0.9, "top_p": 0.95}),
    "ngram-pool": (lambda: registry.create("ngram-pool,level=3,window=3"), LOOP, {"temperature": 0.9}),
    "jacobi": (lambda: registry.create("jacobi,tree=16"), LOOP, {"temperature": 0.9, "top_p": 0.95}),
}


@pytest.fixture
def _one_thread():
    """Threads have nothing to share in so small a model, and wait for each other where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(900)
def test_sampled_text_has_the_targets_distribution(stories, case):
    make, begun, warping = CASES[case]
    target, tokenizer = load(stories, dtype="float32", device=DEVICE), load_tokenizer(stories)
    model = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    # One token to begin with where drafts are of the noise: the first token of an answer is then drafted too.
    prompt = tokenizer.encode(begun)[-1:] if begun != LOOP else tokenizer.encode(begun)
    # One token more than is looked at: the last of an answer is never drafted.
    wishes = [SamplingParams(max_tokens=DEPTH + 1, ignore_eos=True, seed=i, **warping) for i in range(SAMPLES)]
    engine = Engine(target, make(), max_batch=64, prefill_chunk=4096)
    out = [done for part in parts(wishes, 2000) for done in engine.generate([prompt] * len(part), part)]
    drafted = sum(done.stats.draft_tokens for done in out)
    kept = sum(sum(done.stats.accepted[1:]) for done in out)
    assert drafted > SAMPLES / 2
    assert SAMPLES / 10 < kept < drafted
    outcomes = law(model, prompt, wishes[0])
    expected = np.array(list(outcomes.values()))
    assert expected.sum() == pytest.approx(1, abs=1e-6)
    counts = counted([done.tokens for done in out], outcomes)
    p_value = fit(counts, expected / expected.sum())
    # Would it be noticed?
    warmer = SamplingParams(**{**warping, "temperature": warping["temperature"] * WARMER})
    other = law(model, prompt, warmer, like=outcomes)
    blurred = np.array([other.get(text, 0.0) for text in outcomes])
    wrong = fit(counts, blurred / blurred.sum())
    print(f"{case}: p = {p_value:.3f} ({wrong:.1e} if the temperature were off), {len(outcomes)} outcomes, ", end="")
    print(f"{sum(done.new_tokens for done in out) / sum(done.rounds for done in out):.2f} tokens a round")
    assert p_value > 1e-3
    assert wrong < 1e-6


# Greedy text ---------------------------------------------------------------------------------------------------------

QUESTIONS, ALSO_BY_TRANSFORMERS, NEW = 120, 24, 64
SORTED = REPOSITORY / "checkpoints" / "sorted"
"""Does not ship; `make zoo` makes it."""
DRAFTERS = [
    "prompt-lookup",
    "prompt-lookup,variant=transformers",
    "prompt-lookup,variant=vllm",
    "sam",
    "sam+prompt-lookup",
    "sam+recycling,tree=16",
    "suffix,shape=tree",
    "hierarchy",
    "recycling",
    "recycling,tree=16",
    "ngram-pool",
    "jacobi",
    "jacobi,tree=0,retrieve=none",
    "model:{folder}-draft",
    "model:{folder}-draft,stop=confidence,context=64",
    "model:{folder}-draft,tree=8,width=3,vocab=2048",
    "sam+model:{folder}-draft,context=64",
    f"s2d:{SORTED},context=64",
    f"s2d:{SORTED},thresholds=0.5",
    "kangaroo:{folder}-kangaroo",
    "medusa:{folder}-medusa",
    "medusa:{folder}-medusa,tree=63",
    "eagle:{folder}-eagle",
    "eagle3:{folder}-eagle3",
    "sam+eagle3:{folder}-eagle3",
    "sam+medusa:{folder}-medusa,tree=8,vocab={folder}-draft/paceline/vocab.safetensors",
]
EXACT_QUESTIONS = 40
TIES = 0.005
"""Share of the answers that may part at a tie."""


def is_here(spec):
    """Whether the checkpoints that a drafter names exist."""
    folders = [Path(part.split(":")[1].split(",")[0]) for part in spec.split("+") if ":" in part]
    return all((folder / "config.json").exists() for folder in folders)


@torch.inference_mode()
def check_questions(folder, file, count, by_transformers, report):
    """Answer `count` questions plainly and with every drafter; some by transformers too."""
    target, tokenizer = load(folder, dtype="float32", device=DEVICE), load_tokenizer(folder)
    room = target.max_context - NEW
    prompts = [encode(tokenizer, text, room) for text in questions(file, count)]
    wish = SamplingParams(max_tokens=NEW)
    plain = Engine(target, "none", tokenizer=tokenizer).generate(prompts, wish)
    model, exact = (AutoModelForCausalLM.from_pretrained(folder, dtype=d) for d in (torch.float32, torch.float64))
    wrong = []
    answers = ties = 0

    def compare(name, number, one, other):
        nonlocal answers, ties
        answers += 1
        if one != other:
            found = parting((model, exact), prompts[number], one, other)
            report(f"{name}, question {number}, {found.told}")
            ties += found.tie
            wrong.extend([] if found.tie else [f"{name}, question {number}, {found.told}"])

    spread = range(0, count, max(1, count // by_transformers))
    for i in spread:
        theirs = generate(model, prompts[i], NEW, target.eos_token_ids)[len(prompts[i]) :]
        compare("transformers", i, plain[i].tokens, theirs)
    lengths = sorted(map(len, prompts))
    report(f"{count} prompts of {lengths[0]} to {lengths[-1]} tokens, {len(spread)} by transformers")
    for name in (spec.format(folder=folder) for spec in DRAFTERS):
        if not is_here(name):
            report(f"without {name}, whose files are not there")
            continue
        out = Engine(target, name, tokenizer=tokenizer).generate(prompts, wish)
        for i, (done, known) in enumerate(zip(out, plain, strict=True)):
            compare(name, i, known.tokens, done.tokens)
            assert done.finish_reason == known.finish_reason or done.tokens != known.tokens
        tokens, rounds = sum(done.new_tokens for done in out), sum(done.rounds for done in out)
        report(f"{name}: {tokens / rounds:.2f} tokens a round")
        assert rounds < sum(done.rounds for done in plain)
    assert not wrong, "\n".join(wrong)
    assert ties <= TIES * answers


EXACT = [
    "none",
    "sam",
    "recycling,tree=16",
    "sam+recycling,tree=16",
    "model:{folder}-draft",
    "kangaroo:{folder}-kangaroo",
]
"""Drafters of chains and trees; "none" shows that batches alone change nothing."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_exact_answers_to_spec_bench_are_plain_ones_token_for_token(demo, shared, dtype):
    """Without a tie: at batch 1, 8 and 32, prompts in pieces beside rows that answer."""
    file = shared / "data" / "spec-bench" / "question.jsonl"
    if not file.exists():
        pytest.skip(f"{file} not found; set PACELINE_SHARED")
    target, tokenizer = load(demo, dtype=dtype, device="cpu"), load_tokenizer(demo)
    prompts = [encode(tokenizer, text, 512) for text in questions(file, EXACT_QUESTIONS)]
    wish = SamplingParams(max_tokens=NEW)
    plain = Engine(target, tokenizer=tokenizer, exact=True, max_batch=1).generate(prompts, wish)
    for spec in (spec.format(folder=demo) for spec in EXACT):
        if not is_here(spec):
            continue
        for batch in (1, 8, 32):
            engine = Engine(target, spec, tokenizer=tokenizer, max_batch=batch, prefill_chunk=100)
            out = engine.generate(prompts, wish)
            same = sum(a.tokens == b.tokens for a, b in zip(out, plain, strict=True))
            print(f"{dtype}, {spec.replace(str(demo), demo.name)}, batch {batch}: {same} of {len(prompts)} identical")
            assert same == len(prompts)


@pytest.mark.timeout(1800)
def test_greedy_answers_to_spec_bench_are_plain_ones(demo, shared):
    file = shared / "data" / "spec-bench" / "question.jsonl"
    if not file.exists():
        pytest.skip(f"{file} not found; set PACELINE_SHARED")
    check_questions(demo, file, QUESTIONS, ALSO_BY_TRANSFORMERS, print)
