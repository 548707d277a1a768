"""The model card: what the demo family was trained on, what was measured, and what it answers, written by a command.

The prose is in card.md.jinja. The card also shows how many answers fell into a loop, the loss on held-out text beside a
5-gram model's, how far the draft agrees, and the loss curve as a picture.

Doesn't know: how training works; it reads the logs and reports that the stages left beside the weights.

    python -m zoo card models/demo --draft models/demo-draft --prompts build/held-out.jsonl
    --out models/README.md
"""

import json
from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from safetensors.torch import load_file

from paceline.bench.record import MAX_NGRAM, WINDOW
from paceline.draft.models.vocab import FILE as VOCABULARY
from paceline.draft.models.vocab import read_vocabulary
from paceline.target.folder import TUNED_FILE
from paceline.train.loop import read_log
from zoo.answers import LONGEST, Answer, counts
from zoo.looping import LoopCount, table
from zoo.text import STAGE_FILE

SOURCES: dict[str, dict[str, str]] = STAGE_FILE["sources"]
UNKNOWN = {"what": "given on the command line", "licence": "not recorded"}
HEADS = {
    "medusa": "Heads over the last state",
    "hydra": "Heads that read the drafted tokens before them",
    "amphista": "Heads that see each other",
}
"""Drafters that fill a tree of fixed shape, and what they are."""
STAGES = ("pretrain", "chat", "settle")


def card(
    folder: Path,
    draft: Path | None,
    drafters: Sequence[Path],
    answers: Sequence[Answer],
    samples: Sequence[Answer],
    practice: str,
) -> str:
    """The whole card, Markdown. practice: the table of `practised`."""
    evaluation, looping = folder / "evaluation.json", folder / "looping.json"
    loops = []
    if looping.exists():
        rows = json.loads(looping.read_text())
        loops = [LoopCount(**{key: value for key, value in row.items() if key != "share"}) for row in rows]
    report = json.loads(evaluation.read_text()) if evaluation.exists() else {}
    context = {
        "name": folder.name,
        "shape": shape_of(folder),
        "stages": [(s, stage_report(folder, s)) for s in STAGES if (folder / f"training-{s}.json").exists()],
        "loss": loss_table(report) if report else "",
        "loop_sentence": loop_sentence(loops),
        "loop_table": table(loops) if loops else "",
        "window": WINDOW,
        "ngram": MAX_NGRAM,
        "longest": LONGEST,
        "counts": counts(answers),
        "practice": practice,
        "samples": samples,
        "draft": draft and _draft_context(draft, report),
        "drafters": [drafter_part(drafter) for drafter in drafters],
    }
    template = Environment(
        loader=PackageLoader("zoo", "."), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    template.filters["quoted"] = _quoted
    return template.get_template("card.md.jinja").render(context).strip() + "\n"


def _draft_context(draft: Path, report: Mapping[str, Any]) -> dict[str, str]:
    return {
        "name": draft.name,
        "shape": shape_of(draft),
        "training": stage_report(draft, "distil"),
        "agreement": agreement_table(report) if "agreement" in report else "",
        "coverage": vocabulary_part(draft) if (draft / VOCABULARY).exists() else "",
    }


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines()) or "> (nothing)"


def loop_sentence(counts: Sequence[LoopCount]) -> str:
    """How often greedy answers run into a loop, and sampled ones."""
    greedy = [f"{count.looping} of {count.answers} ({count.prompts})" for count in counts if not count.temperature]
    sampled = [f"{count.looping} of {count.answers} ({count.prompts})" for count in counts if count.temperature]
    sentences = [f"Greedy answers that run into a loop: {', '.join(greedy)}." if greedy else ""]
    sentences.append(f"Sampled answers that do: {', '.join(sampled)}." if sampled else "")
    return " ".join(filter(None, sentences))


def stage_report(folder: Path, stage: str) -> str:
    """What one stage read, how long it took and its held-out loss: a sentence and a table."""
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
        origin = SOURCES.get(name.removeprefix("text/"), UNKNOWN)
        seen, passes = source["rows_seen"] * length, source["rows_seen"] / source["rows"]
        loss = f"{valid[name]:.2f}" if name in valid else "-"
        lines.append(f"| {name} | {origin['what']} | {origin['licence']} | {seen:,} | {passes:.1f} | {loss} |")
    return "\n".join(lines)


def stage_log(folder: Path, stage: str) -> list[dict[str, Any]]:
    """The log of a stage, in order."""
    return read_log(folder / f"training-{stage}.jsonl")


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


def _tuned_part(folder: Path) -> str:
    """A section on a model that `paceline train jacobi` wrote."""
    facts = json.loads((folder / TUNED_FILE).read_text())
    start, tokens = facts["tuned_from"]["name"], facts["recipe"]["loop"]["tokens"]
    before = facts["losses"][start]
    return (
        f"## {folder.name}\n\n{start} tuned with noise, so that it drafts for itself: another model, for `jacobi:` "
        f"on itself ({folder_size(folder) / 1e6:.1f} MB). {tokens:,} tokens of {start}'s own answers; loss on "
        f"clean held-out answers {facts['loss']:.3f} nats a token, {start}'s {before:.3f}."
    )


def drafter_part(folder: Path) -> str:
    """A section on a drafter that a command of `paceline train` wrote into `folder`: what it is, what it was trained on
    and how far it agrees with its target on held-out answers."""
    if (folder / TUNED_FILE).exists():
        return _tuned_part(folder)
    config = json.loads((folder / "config.json").read_text())
    kind, recipe, held = config["paceline_drafter"], config["recipe"], config["held_out"]["all"]
    weights = load_file(folder / "model.safetensors")
    size = f"{sum(w.numel() for w in weights.values()):,} numbers, {folder_size(folder) / 1e6:.1f} MB"
    target, tokens = config["target"]["name"], recipe["loop"]["tokens"] or tokens_trained(folder)
    if kind == "kangaroo":
        what = f"An adapter after layer {config['exit_layer']} of {target} ({size}), for `kangaroo:`"
        rows = [("no adapter", config["untrained"]["all"][0]), ("adapter", held[0])]
        note = f"cross-entropy with the target's distribution, of which {held[0]['entropy']:.2f} is its own entropy"
        table = [f"| {name} | {fit['soft_ce']:.2f} | {fit['overlap']:.3f} | {fit['top1']:.3f} |" for name, fit in rows]
    elif kind in HEADS:
        what = f"{HEADS[kind]} for {target} ({size}), for `{kind}:`"
        lines = [
            f"| {depth} | {fit['positions']:,} | {fit['top1']:.3f} | {fit['top5']:.3f} |"
            for depth, fit in enumerate(held, 1)
        ]
        head = ["| depth | positions | best guess right | among the best five |", "|---:|---:|---:|---:|"]
        summary = f"{what}. Trained on {tokens:,} tokens of the target's own answers. On answers held out:"
        return "\n".join([f"## {folder.name}", "", summary, "", *head, *lines])
    elif kind in ("eagle", "eagle3"):
        states = "last state" if kind == "eagle" else "states of three layers"
        what = f"A layer over the {states} of {target} ({size}), for `{kind}:`" + " and vLLM" * (kind == "eagle3")
        note = "drafts that the text followed so far"
        table = [
            f"| depth {n} | {fit['reached']:,} | {fit['overlap']:.3f} | {fit['accepted']:.3f} |"
            for n, fit in enumerate(held, 1)
        ]
    else:
        exits = ", ".join(map(str, config["exits"]))
        layers = config["num_hidden_layers"]
        what = f"A model cut from the first {layers} layers of {target}, with exits after {exits} ({size}), for `s2d:`"
        note = "cross-entropy with what the target wrote"
        table = [
            f"| exit {n} | {fit['loss']:.2f} | {fit['overlap']:.3f} | {fit['top1']:.3f} |"
            for n, fit in zip(config["exits"], held, strict=True)
        ]
    note += "" if kind in ("eagle", "eagle3") else ", nats"
    head = [f"| | {note} | sum of min(p, q) | same first choice |", "|---|---:|---:|---:|"]
    summary = f"{what}. Trained on {tokens:,} tokens, the target's own answers over and over. On answers held out:"
    return "\n".join([f"## {folder.name}", "", summary, "", *head, *table])


def tokens_trained(folder: Path) -> int:
    """Tokens that a drafter was trained on, from the log beside it."""
    return int(json.loads((folder / "training.jsonl").read_text().splitlines()[-1])["tokens"])


def vocabulary_part(draft: Path) -> str:
    """How much of the target's answers the trimmed vocabularies of `draft` cover, as a table."""
    vocabulary = read_vocabulary(draft / VOCABULARY)
    rows = vocabulary.facts["coverage"]
    names = [name for name in rows[0] if name != "k"]
    lines = [f"| K | {' | '.join(names)} |", "|---:|" + "---:|" * len(names)]
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
