"""Readers of scenarios and prompts: SpecBench's folders, its hub layout, your own in YAML, our sample.

The repository (zzzhr97/SpecBench, data/) has a folder for each scenario, with prompts.json, specifications.json and
scenario.json. The hub has a table for each (Parquet, JSON or JSON Lines), whose rows repeat the rules in columns
safety_spec_1.. and behavioral_spec_1.. Your own scenario is a file with rules and prompts: docs/research/eval-
align.md."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, Field, ValidationError, model_validator

from paceline.errors import PacelineError, install, meant
from paceline.evals.align import sample
from paceline.evals.align.types import KINDS, Data, Item, Label, Rule, Scenario
from paceline.jsonl import loads
from paceline.textfiles import objects

PROMPTS, RULES, ABOUT = "prompts.json", "specifications.json", "scenario.json"
TABLES = (".parquet", ".jsonl", ".json")
OWN = (".yaml", ".yml")

Loaded = tuple[Scenario, list[Item]]


def read(source: str, scenarios: Sequence[str] = (), limit: int | None = None) -> Data:
    """Scenarios of `source`: "sample", "sample,items=N", a folder, a YAML file, or a hub id.

    scenarios  their names; empty: all.
    limit      most items, taken as in `spread`.
    Raises PacelineError in one line if something is missing or broken."""
    loaded = _load(source)
    known = {scenario.key: scenario for scenario, _ in loaded}
    for name in scenarios:
        if name not in known:
            raise PacelineError(f"{source} has no scenario {name!r}; it has {', '.join(known)}.{meant(name, known)}")
    chosen = {key: known[key] for key in (scenarios or known)}
    items = [item for scenario, own in loaded if scenario.key in chosen for item in own]
    return Data(source, chosen, tuple(items if limit is None else spread(items, limit)))


def spread(items: Sequence[Item], limit: int) -> list[Item]:
    """`limit` items in their order, with the proportions of all items.

    Scenarios take turns, and so do labels: two unsafe items for each safe one, as long as there are enough."""
    queues: dict[str, dict[tuple[str, int], list[int]]] = {}
    seen: dict[tuple[str, str], int] = {}
    for i, item in enumerate(items):
        count = seen[item.scenario, item.label] = seen.get((item.scenario, item.label), 0) + 1
        lane = count % 2 if item.label == "unsafe" else 0
        queues.setdefault(item.scenario, {}).setdefault((item.label, lane), []).append(i)
    taken = _in_turn(_in_turn(lanes.values()) for lanes in queues.values())[:limit]
    return [items[i] for i in sorted(taken)]


def _in_turn(queues: Iterable[Sequence[int]]) -> list[int]:
    return [i for layer in zip_longest(*queues) for i in layer if i is not None]


def _load(source: str) -> list[Loaded]:
    if source.split(",")[0] == "sample":
        return sample.read(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return [_file(path)]
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return _hub(source)
    raise PacelineError(f"there is no data at {source!r}; give a folder, a .yaml file, a hub id, or `sample`")


def _folder(path: Path) -> list[Loaded]:
    """Load a folder: folders of the repository, tables of the hub's layout, or your own files."""
    folders = [path, *sorted(inner for inner in path.iterdir() if inner.is_dir())]
    if loaded := [_repository(folder) for folder in folders if (folder / PROMPTS).is_file()]:
        return loaded
    files = sorted(f for f in path.rglob("*") if f.suffix in TABLES + OWN and f.is_file())
    if not files:
        raise PacelineError(
            f"{path} holds no scenarios: neither folders with {PROMPTS}, nor tables ({', '.join(TABLES)}), "
            f"nor files of your own ({', '.join(OWN)})"
        )
    return [_file(file) for file in files]


def _file(path: Path) -> Loaded:
    import yaml

    try:
        if path.suffix in TABLES:
            return _table(_rows(path), path.stem.split("-")[0], str(path))
        about = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise PacelineError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    except ImportError:
        raise PacelineError(f"reading {path} needs pyarrow; {install('packages/evals')}") from None
    return _loaded(path.stem, about, str(path))


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        return rows
    return [row for _, row in objects(path, PacelineError, "a prompt with its rules")]


def _hub(name: str) -> list[Loaded]:
    """The splits of a data set on the hub."""
    try:
        import datasets

        splits = datasets.load_dataset(name)
    except ImportError:
        raise PacelineError(f"reading from the hub needs the package datasets; {install('packages/evals')}") from None
    except Exception as error:  # The package raises many kinds of errors.
        why = " ".join(str(error).split())[:200]
        raise PacelineError(f"{name!r} is no folder and cannot be read from the hub ({why})") from None
    return [_table(list(rows), split, f"{name}, split {split}") for split, rows in splits.items()]


def _repository(folder: Path) -> Loaded:
    about: dict[str, Any] = {}
    for file in (folder / ABOUT, folder / RULES, folder / PROMPTS):
        try:
            value = loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise PacelineError(f"{file} cannot be read: {error}") from None
        about |= value if isinstance(value, dict) else {"prompts": value}
    return _loaded(folder.name, about, str(folder))


def _table(rows: list[dict[str, Any]], key: str, where: str) -> Loaded:
    """One split. Its rules are those of the first row, which every row must repeat."""
    if not rows:
        raise PacelineError(f"{where} has no rows")
    rules = {kind: _columns(rows[0], f"{kind}_spec_") for kind in KINDS}
    for number, row in enumerate(rows):
        if any(_columns(row, f"{kind}_spec_") != texts for kind, texts in rules.items()):
            raise PacelineError(f"{where}: row {number} has other rules than row 0; a table holds one scenario")
    about = {"name": rows[0].get("scenario"), "description": rows[0].get("scenario_description"), "prompts": rows}
    return _loaded(key, about | rules, where)


def _columns(row: Mapping[str, Any], prefix: str) -> list[str]:
    """The rules of a row that are not empty, by the number in the column's name."""
    named = ((int(name.removeprefix(prefix)), text) for name, text in row.items() if name.startswith(prefix))
    return [str(text) for _, text in sorted(named) if text]


# The common form of all layouts ---------------------------------------------------------------------------------------

Text = Annotated[str, Field(pattern=r"\S")]


class _Rule(BaseModel):
    """A text, or an object with "text" and "weight"."""

    text: Text
    weight: float = Field(1.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        return {"text": value} if isinstance(value, str) else value


class _Prompt(BaseModel):
    prompt: Text
    label: Label
    adversarial_prompt: str | None = None
    source: str | None = None
    answer: str | None = None


class _File(BaseModel):
    """A scenario with its prompts."""

    name: str | None = None
    description: str | None = None
    safety: list[_Rule] = Field(min_length=1, validation_alias=AliasChoices("safety", "safety_specifications"))
    behavioral: list[_Rule] = Field(
        min_length=1, validation_alias=AliasChoices("behavioral", "behavioral_specifications")
    )
    prompts: list[_Prompt] = Field(min_length=1)


def _loaded(key: str, about: Any, where: str) -> Loaded:
    """A scenario and its items from plain values. Without an adversarial prompt the plain one is asked."""
    try:
        file = _File.model_validate(about)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}." for part in first["loc"]).removesuffix(".")
        said = ": ".join(filter(None, (place, first["msg"].replace(" or instance of _File", ""))))
        raise PacelineError(
            f"{where}: {said}. A scenario is an object with lists of safety and behavioral rules and "
            "of prompts, each with a label, unsafe or safe"
        ) from None
    safety, behavioral = (
        tuple(Rule(kind, index, rule.text, rule.weight) for index, rule in enumerate(rules, 1))
        for kind, rules in zip(KINDS, (file.safety, file.behavioral), strict=True)
    )
    items = [
        Item(f"{key}/{i:03d}", key, one.prompt, one.adversarial_prompt or one.prompt, one.label, one.source or "",
             one.answer or None)
        for i, one in enumerate(file.prompts)
    ]  # fmt: skip
    return Scenario(key, file.name or key, file.description or "", safety, behavioral), items
