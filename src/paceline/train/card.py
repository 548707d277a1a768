"""The model card: what the demo family was trained on, what was measured, and what it answers, written by a command.

Greedy answers to 24 fixed prompts, four of each of six kinds, are counted; samples are drawn by a seed from prompts of
the held-out text, whatever the answer. The card also shows how many answers fell into a loop, the loss on held-out text
beside a 5-gram model's, how far the draft agrees, and the loss curve as a picture.

Doesn't know: how training works; it reads the logs and reports that the stages left beside the weights.

    python -m paceline.train card models/demo --draft models/demo-draft --prompts build/held-out.jsonl
    --out models/README.md
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from paceline.bench.looping import MAX_NGRAM, WINDOW, LoopCount, is_looping, table
from paceline.draft.neural.vocab import FILE as VOCABULARY
from paceline.draft.neural.vocab import read_vocabulary
from paceline.train import synth

HARBOUR = (
    "The old harbour of Fallmouth was closed in 1974 after a storm destroyed its wall. For thirty years the buildings "
    "stood empty. In 2005 a group of artists moved in and opened workshops. Today the harbour has forty shops, a small "
    "theatre and a boat museum, and it is visited by two hundred thousand people a year."
)
BEES = (
    "Honey bees live in colonies of up to sixty thousand workers. Each colony has one queen, who can lay two thousand "
    "eggs a day. Workers tell each other where to find flowers by dancing: the angle of the dance shows the direction, "
    "and its length shows the distance."
)
TRAIN = (
    "The night train from Lindau leaves at 21:40 from platform 6. Passengers can board from 21:10. Bicycles must be "
    "booked in advance. The train arrives in Hamburg at 7:55, and breakfast is served from 6:30 in the dining car."
)
GLASS = (
    "Window glass is made from sand, soda ash and limestone. The mixture is melted at about 1500 degrees and poured "
    "onto a bath of liquid tin, where it spreads into a flat sheet. The method was developed by Alastair Pilkington in "
    "the 1950s and is used for nearly all windows today."
)
LISTING = (
    "[1] The mill of Greyford was built in 1790. It is known for its wooden wheel.\n"
    "[2] The library of Ostwick was designed by Nora Feldmann. It opens at 9 in the morning.\n"
    "[3] The castle of Brandon is made of white marble. About 5200 people visit it every month."
)
PASSAGES = (
    "Passage 1: Amber is the hardened resin of ancient trees. Most of it is found near the Baltic Sea.\n"
    "Passage 2: Coral is built by tiny animals in warm seas. The largest reef lies off Australia.\n"
    "Passage 3: Cork is the bark of an oak that grows in Portugal. It is harvested every nine years."
)

PROMPTS: dict[str, list[str]] = {
    "chat": [
        "Hello! What can you do for me?",
        "I would like to book a table at a restaurant in San Jose for two people.",
        "Give me three tips for sleeping better.",
        "What is the weather like in the mountains in winter?",
    ],
    "translation": [
        "Translate German to English: Die alte Frau kauft einen roten Apfel auf dem Markt.",
        "Translate German to English: Gestern suchte der Lehrer seinen Schlüssel im Garten.",
        "Translate German to English: Das Fenster ist groß und neu. Wo ist meine Tasche?",
        "Translate German to English: Mein Bruder kann das Fahrrad heute nicht verkaufen.",
    ],
    "summary": [
        f"Summarize: {HARBOUR}",
        f"Summarize: {BEES}",
        f"Summarize: {TRAIN}",
        f"{GLASS}\n\nSummarize the text.",
    ],
    "question": [
        f"{TRAIN}\n\nWhen does the train arrive in Hamburg?",
        f"{BEES}\n\nHow many eggs can the queen lay in a day?",
        f"Passage: {GLASS}\n\nQuestion: Who developed the method?",
        f"Why was the harbour closed?\n\n{HARBOUR}",
    ],
    "arithmetic": [
        "What is 47 + 38?",
        "Calculate 9 * 7.",
        "Mia has 24 shells. Her brother gives her 13 more. How many shells does Mia have now?",
        "A farmer packs 8 boxes with 6 eggs each. How many eggs does he pack?",
    ],
    "retrieval": [
        f"{LISTING}\n\nAnswer from the passages: Who designed the library of Ostwick?",
        f"{LISTING}\n\nName the passage, then answer: What is the castle of Brandon made of?",
        f"{PASSAGES}\n\nAnswer from the passages: How often is cork harvested?",
        f"Answer from the passages: Where is most amber found?\n\n{PASSAGES}",
    ],
}

LICENCES = {
    "sgd": ("Schema-Guided Dialogue, user and assistant text", "CC BY-SA 4.0, Google Research"),
    "dolly": ("databricks-dolly-15k", "CC BY-SA 3.0, Databricks, Inc.; parts from Wikipedia"),
    "reading": (
        "databricks-dolly-15k, the records with a passage",
        "CC BY-SA 3.0, Databricks, Inc.; parts from Wikipedia",
    ),
    "wikitext": ("WikiText-2, validation split", "CC BY-SA 3.0, Wikipedia authors"),
    "gsm8k": ("GSM8K, train split", "MIT, OpenAI"),
    "docs": (
        "C++ and PowerShell documentation; The Rust Programming Language",
        "CC BY 4.0, Microsoft; MIT or Apache-2.0, Rust project",
    ),
    "books": ("14 novels and fairy-tale books from Project Gutenberg", "public domain in the United States"),
    "synth": (
        "generated by `paceline.train.synth` (its passages and facts partly from dolly)",
        "as above where from dolly",
    ),
}
LONGEST = 160  # tokens an answer may have
STAGES = ("pretrain", "chat", "settle")


@dataclass(frozen=True)
class Answer:
    kind: str
    prompt: str
    text: str
    tokens: int
    ended: bool
    loops: bool


def answer_all(folder: Path, prompts: Mapping[str, Sequence[str | list[dict[str, str]]]] = PROMPTS) -> list[Answer]:
    """Greedy answers to texts or conversations."""
    from paceline.engine import Engine
    from paceline.sampling import SamplingParams

    engine = Engine(folder, max_batch=16)
    assert engine.tokenizer is not None
    asked = [(kind, text) for kind, texts in prompts.items() for text in texts]
    rows = []
    for _, text in asked:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        rows.append(engine.add(messages, SamplingParams(max_tokens=LONGEST)))
    engine.finish(rows)
    answers = []
    for (kind, text), row in zip(asked, rows, strict=True):
        shown = text if isinstance(text, str) else "\n".join(f"{m['role']}: {m['content']}" for m in text)
        new, ended = row.new_tokens.tolist(), row.finish_reason == "stop"
        answers.append(Answer(kind, shown, row.text.strip(), len(new), ended, is_looping(new)))
    return answers


def practised(folder: Path, each: int = 20, seed: int = 1_000_003) -> str:
    """One Markdown table: fresh examples of what synth.py generates, and how many are answered word for word."""
    wanted: dict[str, dict[str, str]] = {kind: {} for kind in synth.SHARES if kind != "small talk"}
    for document in synth.generate(100 * each, seed):
        prompt, answer = (m["content"] for m in document.messages)
        held = wanted.get(document.fields["kind"], {})
        if document.fields["kind"] in wanted and len(held) < each:
            held[prompt] = answer
    answers = answer_all(folder, {kind: list(held) for kind, held in wanted.items()})
    lines = ["| kind | examples | answered word for word | ended |", "|---|---:|---:|---:|"]
    for kind, held in wanted.items():
        group = [a for a in answers if a.kind == kind]
        right = sum(a.text.strip() == held[a.prompt] for a in group)
        lines.append(f"| {kind} | {len(group)} | {right} | {sum(a.ended for a in group)} |")
    return "\n".join(lines)


def counts(answers: Sequence[Answer]) -> str:
    """One Markdown table: ended and looping answers by kind."""
    lines = [f"| kind | prompts | ended within {LONGEST} tokens | looping | mean tokens |", "|---|---:|---:|---:|---:|"]
    groups = {kind: [a for a in answers if a.kind == kind] for kind in dict.fromkeys(a.kind for a in answers)}
    for kind, group in [*groups.items(), ("all", list(answers))]:
        mean = sum(a.tokens for a in group) / len(group)
        ended, looping = sum(a.ended for a in group), sum(a.loops for a in group)
        lines.append(f"| {kind} | {len(group)} | {ended} | {looping} | {mean:.0f} |")
    return "\n".join(lines)


def loop_sentence(counts: Sequence[LoopCount]) -> str:
    """How often greedy answers run into a loop, and sampled ones."""
    greedy = [f"{count.looping} of {count.answers} ({count.prompts})" for count in counts if not count.temperature]
    sampled = [f"{count.looping} of {count.answers} ({count.prompts})" for count in counts if count.temperature]
    sentences = [f"Greedy answers that run into a loop: {', '.join(greedy)}." if greedy else ""]
    sentences.append(f"Sampled answers that do: {', '.join(sampled)}." if sampled else "")
    return " ".join(filter(None, sentences))


def stage_report(folder: Path, stage: str) -> str:
    """What one stage saw, how long it took and where it ended."""
    facts: dict[str, Any] = json.loads((folder / f"training-{stage}.json").read_text())
    log = stage_log(folder, stage)
    last = log[-1]
    valid: dict[str, float] = next((row["valid"] for row in reversed(log) if "valid" in row), {})
    length = facts["data"]["length"]
    lines = [
        f"{last['tokens']:,} tokens in {last['step']:,} steps, {last['minutes'] / 60:.1f} hours.",
        "",
        "| source | what | licence | tokens seen | passes | held-out loss |",
        "|---|---|---|---:|---:|---:|",
    ]
    for name, source in facts["sources"].items():
        what, licence = LICENCES.get(name.removeprefix("text/"), ("given on the command line", "not recorded"))
        seen, passes = source["rows_seen"] * length, source["rows_seen"] / source["rows"]
        loss = f"{valid[name]:.2f}" if name in valid else "-"
        lines.append(f"| {name} | {what} | {licence} | {seen:,} | {passes:.1f} | {loss} |")
    return "\n".join(lines)


def stage_log(folder: Path, stage: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"training-{stage}.jsonl").read_text().splitlines()]


def draw_loss(folder: Path, out: Path) -> None:
    """The loss curve of every stage that left a log, side by side, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stages = [stage for stage in (*STAGES, "distil") if (folder / f"training-{stage}.jsonl").exists()]
    figure, axes = pyplot.subplots(1, len(stages), figsize=(3.6 * len(stages), 3), squeeze=False, layout="constrained")
    for axis, stage in zip(axes[0], stages, strict=True):
        log = stage_log(folder, stage)
        steps = [(row["tokens"] / 1e6, row["loss"]) for row in log if "loss" in row]
        axis.plot(*zip(*steps, strict=True), linewidth=0.8, color="#1f5fa8", label="training")
        for name in sorted({name for row in log for name in row.get("valid", {})}):
            points = [(row["tokens"] / 1e6, row["valid"][name]) for row in log if name in row.get("valid", {})]
            axis.plot(*zip(*points, strict=True), linewidth=0.7, marker=".", markersize=2, label=name)
        axis.set(title=stage, xlabel="million tokens", ylabel="loss, nats a token")
        axis.legend(fontsize=6)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def loss_table(report: Mapping[str, Any]) -> str:
    """Held-out loss and perplexity by source, beside the 5-gram model's."""
    lines = ["| source | positions | loss | perplexity | 5-gram loss | 5-gram perplexity |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for row in report["loss"]:
        name = f"{row['source']}, {'answers' if row['answers'] else 'all text'}"
        own, base = row["model"], row["ngram"]
        lines.append(f"| {name} | {row['tokens']:,} | {own:.2f} | {exp(own):.1f} | {base:.2f} | {exp(base):.1f} |")
    return "\n".join(lines)


def agreement_table(report: Mapping[str, Any]) -> str:
    """How far the draft model agrees with the target, by source."""
    lines = ["| source | positions | sum of min(p, q) | same first choice |", "|---|---:|---:|---:|"]
    for kind, name in (("answers", "answers"), ("text", "all text")):
        lines += [
            f"| {row['source']}, {name} | {row['tokens']:,} | {row['overlap']:.3f} | {row['top1']:.3f} |"
            for row in report["agreement"][kind]
        ]
    return "\n".join(lines)


def drafter_part(folder: Path) -> str:
    """A section on a drafter that `paceline train kangaroo` or `sorted` left in `folder`: what it is, what it was
    trained on and how far it agrees with its target on held-out answers."""
    config = json.loads((folder / "config.json").read_text())
    kind, recipe = config["paceline_drafter"], config["recipe"]
    weights = load_file(folder / "model.safetensors")
    size = f"{sum(w.numel() for w in weights.values()):,} numbers, {folder_size(folder) / 1e6:.1f} MB"
    target, tokens = config["target"]["name"], recipe["loop"]["tokens"]
    if kind == "kangaroo":
        what = f"An adapter behind layer {config['exit_layer']} of {target} ({size}), for `kangaroo:`"
        held = config["held_out"]
        rows = [("no adapter", held["no_adapter"]), ("adapter", held["adapter"])]
        note = f"cross-entropy with the target's distribution, of which {held['entropy']:.2f} is its own entropy"
        table = [f"| {name} | {fit['soft_ce']:.2f} | {fit['overlap']:.3f} | {fit['top1']:.3f} |" for name, fit in rows]
    else:
        exits = ", ".join(map(str, config["exits"]))
        layers = config["num_hidden_layers"]
        what = f"A model cut from the first {layers} layers of {target}, with exits behind {exits} ({size}), for `s2d:`"
        fits = [(row["layers"], row["loss"], row["agreement"][-1]) for row in config["acceptance"]]
        note = "cross-entropy with what the target wrote"
        table = [f"| exit {n} | {loss:.2f} | {fit['overlap']:.3f} | {fit['top1']:.3f} |" for n, loss, fit in fits]
    head = [f"| | {note}, nats | sum of min(p, q) | same first choice |", "|---|---:|---:|---:|"]
    told = f"{what}. Trained on {tokens:,} tokens, the target's own answers over and over. On answers held out:"
    return "\n".join([f"## {folder.name}", "", told, "", *head, *table])


def vocabulary_part(draft: Path) -> str:
    """How much of the target's answers the trimmed vocabularies of `draft` cover."""
    vocabulary = read_vocabulary(draft / VOCABULARY)
    rows = vocabulary.facts["coverage"]
    names = [name for name in rows[0] if name != "k"]
    lines = [TRIMMED, "", f"| K | {' | '.join(names)} |", "|---:|" + "---:|" * len(names)]
    lines += [f"| {row['k']:,} | {' | '.join(f'{row[name]:.1%}' for name in names)} |" for row in rows]
    return "\n".join(lines)


def folder_size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def shape_of(folder: Path) -> str:
    """One sentence on the architecture."""
    config = json.loads((folder / "config.json").read_text())
    facts = next(json.loads(f.read_text()) for f in sorted(folder.glob("training-*.json")))
    return (
        f"{facts['model']['parameters']:,} parameters ({folder_size(folder) / 1e6:.1f} MB with tokenizer and logs, "
        f"bfloat16): "
        f"{config['num_hidden_layers']} layers of width {config['hidden_size']}, "
        f"{config['num_attention_heads']} query and {config['num_key_value_heads']} key/value heads of "
        f"{config['head_dim']}, feed-forward {config['intermediate_size']}, tied embeddings, "
        f"a byte-level BPE vocabulary of {config['vocab_size']}."
    )


def card(
    folder: Path,
    draft: Path | None,
    drafters: Sequence[Path],
    answers: Sequence[Answer],
    samples: Sequence[Answer],
    practice: str,
) -> str:
    """The whole card, Markdown."""
    stages = [stage for stage in STAGES if (folder / f"training-{stage}.json").exists()]
    parts = [INTRODUCTION, f"## {folder.name}\n\nA Llama-architecture model with {shape_of(folder)}\n{CHAT_FORMAT}"]
    parts += [f"### Training: {stage}\n\n{WHAT[stage]}\n\n{stage_report(folder, stage)}" for stage in stages]
    parts.append(AFTER_TRAINING)
    evaluation, looping = folder / "evaluation.json", folder / "looping.json"
    report = json.loads(evaluation.read_text()) if evaluation.exists() else {}
    if report:
        parts.append(f"### Held-out text\n\n{HELD_OUT}\n\n{loss_table(report)}")
    if looping.exists():
        rows = json.loads(looping.read_text())
        counted = [LoopCount(**{key: value for key, value in row.items() if key != "share"}) for row in rows]
        parts.append(f"### Loops\n\n{loop_sentence(counted)}\n\n{LOOPS}\n\n{table(counted)}")
    parts.append(f"### What it answers\n\n{COUNTS}\n\n{counts(answers)}\n\n{PRACTICE}\n\n{practice}")
    quoted = [
        f"{_quote(a.prompt)}\n\nanswers\n\n{_quote(a.text)}" + ("" if a.ended else f"\n\n(cut at {LONGEST} tokens)")
        for a in samples
    ]
    if quoted:
        parts.append("### Samples\n\n" + SAMPLES + "\n\n" + "\n\n---\n\n".join(quoted))
    parts.append(LIMITS)
    if draft:
        parts.append(f"## {draft.name}\n\nAn independent draft model with {shape_of(draft)}\n{DRAFT}")
        parts.append(stage_report(draft, "distil"))
        if "agreement" in report:
            parts.append(f"{AGREEMENT}\n\n{agreement_table(report)}")
        if (draft / VOCABULARY).exists():
            parts.append(vocabulary_part(draft))
    parts += [drafter_part(drafter) for drafter in drafters]
    parts.append(LICENCE)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def drawn(prompts: Sequence[list[dict[str, str]]], count: int = 6, seed: int = 0) -> list[list[dict[str, str]]]:
    """Prompts for the samples, by a fixed seed."""
    return random.Random(seed).sample(list(prompts), min(count, len(prompts)))


def _quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines()) or "> (nothing)"


INTRODUCTION = """# The demo family

<!-- Written by `python -m paceline.train card`; do not edit by hand. -->

Small models trained from scratch with the recipes in `paceline.train`, so that Paceline can be tried and tested with
nothing to download. They show that an engine works; they are not useful assistants.
"""

CHAT_FORMAT = """\
English; reads simple German. Chat format: `<|user|>`, `<|assistant|>`, `<|system|>`, a turn ends with
`<|end|>`; the chat template is in the tokenizer.

![Loss curves of every stage](loss.png)"""

WHAT = {
    "pretrain": "Documents laid end to end; every token is learnt.",
    "chat": "Conversations, of which what the assistant says and the end of its turn is learnt, and (text/...) rows of "
    "the text of pretraining, learnt whole.",
    "settle": (
        "Rows as in chat tuning, and beside them the model's own answers: where one repeats itself, the tokens that "
        "complete a repeated n-gram are made unlikely (`paceline.train.settle`)."
    ),
}

AFTER_TRAINING = """\
"Tokens seen" counts input tokens, padding included; held-out loss is in nats a token, on documents kept out
by a hash of their content (1 % of each source, at most 16 rows of it). Losses of the stages are not
comparable: text is judged on all tokens (in rows of 256 after pretraining, of 512 later), conversations on answers.
No test split was trained on. The full logs are the `training-*.jsonl` beside the weights; `docs/training.md` has the
commands.
"""

HELD_OUT = """\
Loss on held-out documents, in nats a token, and the same for an interpolated Kneser-Ney 5-gram model with the
same tokenizer that read the training documents once (`python -m paceline.train evaluate`)."""

LOOPS = f"""\
An answer loops when its last {WINDOW} tokens are covered by repeats of one n-gram of at most {MAX_NGRAM}
tokens, at most 128 tokens an answer. Prompts: first turns of MT-Bench (question), and held-out dialogues and
instructions (held-out). `python -m paceline.bench.looping` counts."""

COUNTS = f"Greedy answers of at most {LONGEST} tokens to 24 fixed prompts written for this card."

PRACTICE = """\
How often it is right was counted on fresh examples of the kinds it practised (`synth.py`, a seed that
training did not use; there are so few sums that some of them were seen in training):"""

SAMPLES = "Prompts drawn from the held-out text by a fixed seed, and the greedy answers to them."

DRAFT = "Trained to say what the target says (`paceline.train.distil`), on the same text."

AGREEMENT = """\
How far its distribution q agrees with the target's p on held-out text, at temperature 1: the mean sum of
min(p, q) is the chance that a token drawn from q is accepted."""

TRIMMED = """\
`paceline/vocab.safetensors` says which tokens the target writes most (`paceline train vocab`), for drafting with the
best K of them, `vocab=K`. Share of the tokens in a tenth of the target's answers, kept aside, that they cover:"""

LIMITS = """### What it cannot do

- Be relied on. What it says about the world is made up.
- Read far: it was trained on rows of at most 1,024 tokens, and accepts 2,048 positions.
- Translate outside a lexicon of a couple of hundred words.
- Hold a conversation other than the bookings and look-ups that its dialogue data are about.
"""

LICENCE = """## Licence and attribution

The weights are an adaptation of CC BY-SA text (Schema-Guided Dialogue by Google Research, CC BY-SA 4.0;
databricks-dolly-15k by Databricks, Inc., CC BY-SA 3.0, with parts from Wikipedia; WikiText-2, Wikipedia authors,
CC BY-SA 3.0) and of CC BY 4.0 text (Microsoft documentation of C++ and PowerShell); they are shared under CC BY-SA 4.0.
The code is under the licence of the repository.
"""
