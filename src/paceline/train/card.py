"""The model card: what the demo model was trained on, what was measured, and what it answers, written by a command.

Greedy answers to 24 fixed prompts, four of each of six kinds; the first of each kind is shown in the card whatever it
is. The card also counts how many answers ended by themselves and how many fell into a loop.

Doesn't know: how training works; it reads the logs that `pretrain` and `chat` left beside the weights.

    python -m paceline.train card models/demo --out models/README.md
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.train import synth
from paceline.train.tokenizer import END

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
LOOP_TAIL, LOOP_GRAM = 64, 16


@dataclass(frozen=True)
class Answer:
    kind: str
    prompt: str
    text: str
    tokens: int
    ended: bool
    loops: bool


def loops(tokens: Sequence[int], tail: int = LOOP_TAIL, longest: int = LOOP_GRAM) -> bool:
    """Whether the last `tail` tokens repeat one n-gram of at most `longest` tokens."""
    last = list(tokens[-tail:])
    return len(last) == tail and any(last[n:] == last[:-n] for n in range(1, longest + 1))


def answer_all(folder: Path, prompts: dict[str, list[str]] = PROMPTS) -> list[Answer]:
    """Greedy answers in float32, one prompt after another."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    end = tokenizer.convert_tokens_to_ids(END)
    answers = []
    for kind, texts in prompts.items():
        for text in texts:
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            with torch.no_grad():
                out = model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
            new = out[0, inputs["input_ids"].shape[1] :].tolist()
            said = tokenizer.decode(new, skip_special_tokens=True)
            answers.append(Answer(kind, text, said, len(new), end in new, loops(new)))
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


def stage_report(folder: Path, stage: str) -> str:
    """What one stage saw, how long it took and where it ended."""
    facts: dict[str, Any] = json.loads((folder / f"training-{stage}.json").read_text())
    log = [json.loads(line) for line in (folder / f"training-{stage}.jsonl").read_text().splitlines()]
    last = log[-1]
    valid: dict[str, float] = next((row["valid"] for row in reversed(log) if "valid" in row), {})
    length = facts["data"]["length"]
    lines = [
        f"{last['tokens']:,} tokens in {last['step']:,} steps of {facts['data']['rows']} rows of {length} tokens, "
        f"{last['minutes']:.1f} minutes.",
        "",
        "| source | what | licence | tokens seen | passes | held-out loss |",
        "|---|---|---|---:|---:|---:|",
    ]
    for name, source in facts["sources"].items():
        what, licence = LICENCES.get(name, ("given on the command line", "not recorded"))
        seen, passes = source["rows_seen"] * length, source["rows_seen"] / source["rows"]
        loss = f"{valid[name]:.2f}" if name in valid else "-"
        lines.append(f"| {name} | {what} | {licence} | {seen:,} | {passes:.2f} | {loss} |")
    return "\n".join(lines)


def card(folder: Path, answers: Sequence[Answer], practice: str) -> str:
    """The whole card, Markdown."""
    config = json.loads((folder / "config.json").read_text())
    facts = json.loads((folder / "training-chat.json").read_text())
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    layout = (
        f"{config['num_hidden_layers']} layers of width {config['hidden_size']}, "
        f"{config['num_attention_heads']} query and {config['num_key_value_heads']} key/value heads, "
        f"feed-forward {config['intermediate_size']}, tied embeddings, "
        f"a byte-level BPE vocabulary of {config['vocab_size']}"
    )
    samples = []
    for kind in PROMPTS:
        answer = next(a for a in answers if a.kind == kind)
        note = "" if answer.ended else f"\n\n(cut at {LONGEST} tokens)"
        samples.append(f"**{kind}**\n\n{_quote(answer.prompt)}\n\nanswers\n\n{_quote(answer.text)}{note}")
    return TEMPLATE.format(
        name=folder.name,
        parameters=facts["model"]["parameters"],
        size=size / 1e6,
        layout=layout,
        pretrain=stage_report(folder, "pretrain"),
        chat=stage_report(folder, "chat"),
        counts=counts(answers),
        practice=practice,
        samples="\n\n".join(samples),
        longest=LONGEST,
        tail=LOOP_TAIL,
        gram=LOOP_GRAM,
    )


def _quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines()) or "> (nothing)"


TEMPLATE = """# The demo family

<!-- Written by `python -m paceline.train card models/{name} --out models/README.md`; do not edit by hand. -->

Small models trained from scratch with the recipes in `paceline.train`, so that Paceline can be tried and tested with
nothing to download. They show that an engine works; they are not useful assistants.

## {name}

A Llama-architecture model with {parameters:,} parameters ({size:.1f} MB with its tokenizer and logs, bfloat16):
{layout}.
English; reads simple German. Chat format: `<|user|>`, `<|assistant|>`,
`<|system|>`, a turn ends with `<|end|>`; the chat template is in the tokenizer.

### Training, stage 1: text

{pretrain}

### Training, stage 2: conversations

The loss covers what the assistant says and the end of its turn.

{chat}

"Tokens seen" counts input tokens, padding included; held-out loss is in nats a token, on documents kept out by a hash
of their content (1 % of each source, at most 8 rows of it). Losses of the two stages are not comparable: the first is
over all tokens, the second over answers. No test split was trained on. The full logs are
`training-pretrain.jsonl` and `training-chat.jsonl` beside the weights; `docs/training.md` has the commands.

### Licence and attribution

The weights are an adaptation of CC BY-SA text (Schema-Guided Dialogue by Google Research, CC BY-SA 4.0;
databricks-dolly-15k by Databricks, Inc., CC BY-SA 3.0, with parts from Wikipedia; WikiText-2, Wikipedia authors,
CC BY-SA 3.0) and of CC BY 4.0 text (Microsoft documentation of C++ and PowerShell); they are shared under CC BY-SA 4.0.
The code is under the licence of the repository.

### What it answers

Greedy decoding in float32 of {longest} tokens at most; 24 fixed prompts written for this card, not chosen by their
answers. "Looping" means that the last {tail} tokens repeat one n-gram of at most {gram} tokens.

{counts}

How often it is right was counted on fresh examples of the kinds it practised (`synth.py`, a seed that training did not
use; there are so few sums that some of them were seen in training):

{practice}

The first prompt of each kind, whatever came out:

{samples}

### What it cannot do

- Be relied on. Its answers are short and nearly always end by themselves; what they say is mostly wrong as soon as a
  prompt differs from what it practised, and then it does not copy the right words from a passage either.
- Know things: facts that do not stand in the prompt are made up.
- Read far: it was trained on rows of at most 512 tokens. It accepts 2048 positions, but has seen nothing beyond 512.
- Translate outside a lexicon of a couple of hundred words, or calculate.
- Hold a conversation other than the bookings and look-ups that its dialogue data are about.
"""
