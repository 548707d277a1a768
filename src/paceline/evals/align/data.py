"""Reading scenarios and prompts: SpecBench's folders, its hub layout, one's own YAML or Markdown, or our sample.

    data = read("data", scenarios=["Child", "Code"], limit=50)

The folders of the repository (zzzhr97/SpecBench, data/): `<Scenario>/prompts.json`, `specifications.json` and
`scenario.json`. The hub's layout: one table a scenario (Parquet, JSON or JSON Lines) whose rows repeat the rules in
columns safety_spec_1.. and behavioral_spec_1..; unused columns are empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, install, meant
from paceline.evals.align import sample
from paceline.evals.align.types import Data, Item, Kind, Rule, Scenario
from paceline.jsonl import loads, objects

PROMPTS, RULES, ABOUT = "prompts.json", "specifications.json", "scenario.json"
TABLES = (".parquet", ".jsonl", ".json")
OWN = (".yaml", ".yml", ".md")
LABELS = ("unsafe", "safe")


class DataError(PacelineError):
    """Scenarios that cannot be found or read."""


def read(source: str, scenarios: Sequence[str] = (), limit: int | None = None) -> Data:
    """Scenarios of `source`: "sample", "sample,items=N", a folder, a YAML or Markdown file, or a hub id.

    scenarios  names to keep; all if empty. limit: the most items, with scenarios and labels in turn.
    Raises DataError in one line if something is missing or broken."""
    found = _read(source)
    data = Data(source, {s.key: s for s, _ in found}, tuple(item for _, items in found for item in items))
    for name in scenarios:
        if name not in data.scenarios:
            there = ", ".join(data.scenarios)
            raise DataError(f"{source} has no scenario {name!r}; it has {there}.{meant(name, data.scenarios)}")
    kept = {key: data.scenarios[key] for key in (scenarios or data.scenarios)}
    items = [item for item in data.items if item.scenario in kept]
    if not items:
        raise DataError(f"{source} holds no prompts")
    return Data(data.name, kept, tuple(items if limit is None else spread(items, limit)))


def spread(items: Sequence[Item], limit: int) -> list[Item]:
    """The first `limit` items with scenarios and labels in turn, two unsafe ones for a safe one where there are
    enough; in the order of `items`. So a short run has the proportions of a whole one."""
    turns: dict[tuple[str, str, int], list[int]] = {}
    seen: dict[tuple[str, str], int] = {}
    for i, item in enumerate(items):
        count = seen[item.scenario, item.label] = seen.get((item.scenario, item.label), 0) + 1
        lane = count % 2 if item.label == "unsafe" else 0
        turns.setdefault((item.scenario, item.label, lane), []).append(i)
    by_scenario: dict[str, list[list[int]]] = {}
    for (scenario, _, _), numbers in turns.items():
        by_scenario.setdefault(scenario, []).append(numbers)
    queues = [_in_turn(lanes) for lanes in by_scenario.values()]
    return [items[i] for i in sorted(_in_turn(queues)[:limit])]


def _in_turn(queues: Iterable[Sequence[int]]) -> list[int]:
    return [i for layer in zip_longest(*queues) for i in layer if i is not None]


Found = list[tuple[Scenario, list[Item]]]


def _read(source: str) -> Found:
    if source.split(",")[0] == "sample":
        return sample.read(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return [_file(path)]
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return _hub(source)
    raise DataError(f"there is no data at {source!r}; give a folder, a .yaml or .md file, a hub id, or `sample`")


def _folder(path: Path) -> Found:
    """Folders of the repository, or tables of the hub's layout, or files of one's own."""
    if (path / PROMPTS).is_file():
        return [_repository(path)]
    folders = sorted(inner for inner in path.iterdir() if (inner / PROMPTS).is_file())
    if folders:
        return [_repository(inner) for inner in folders]
    files = sorted(f for f in path.rglob("*") if f.suffix in TABLES + OWN and f.is_file())
    if not files:
        raise DataError(
            f"{path} holds no scenarios: neither folders with {PROMPTS}, nor tables ({', '.join(TABLES)}), "
            f"nor files of one's own ({', '.join(OWN)})"
        )
    return [_file(file) for file in files]


def _file(path: Path) -> tuple[Scenario, list[Item]]:
    if path.suffix in OWN:
        from paceline.evals.align.custom import read_custom

        return read_custom(path)
    return _table(_rows(path), path.stem.split("-")[0], str(path))


# The repository's layout ----------------------------------------------------------------------------------------


def _repository(folder: Path) -> tuple[Scenario, list[Item]]:
    rules, about = _json(folder / RULES, dict), _json(folder / ABOUT, dict)
    where = str(folder / RULES)
    scenario = Scenario(
        folder.name,
        str(about.get("name", folder.name)),
        str(about.get("description", "")),
        numbered("safety", rules.get("safety_specifications"), where),
        numbered("behavioral", rules.get("behavioral_specifications"), where),
    )
    rows = _json(folder / PROMPTS, list)
    return scenario, [item_of(scenario.key, i, row, str(folder / PROMPTS)) for i, row in enumerate(rows)]


def _json(file: Path, kind: type) -> Any:
    try:
        value = loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, kind):
        raise DataError(f"{file} must hold a JSON {'object' if kind is dict else 'array'}")
    return value


def numbered(kind: Kind, rules: Any, where: str) -> tuple[Rule, ...]:
    """Rules from texts, or from objects with "text" and "weight"; DataError if they are neither."""
    if not isinstance(rules, list) or not rules:
        raise DataError(f"{where}: a scenario needs {kind} rules, at least one, as a list of texts")
    made = []
    for index, rule in enumerate(rules, 1):
        text, weight = (rule.get("text"), rule.get("weight", 1.0)) if isinstance(rule, dict) else (rule, 1.0)
        if not isinstance(text, str) or not text.strip() or not isinstance(weight, int | float) or not weight > 0:
            raise DataError(f"{where}: {kind} rule {index} must be a text, or a text with a weight above 0")
        made.append(Rule(kind, index, text, float(weight)))
    return tuple(made)


def item_of(scenario: str, number: int, row: Any, where: str) -> Item:
    """A prompt from its object; an adversarial prompt that is missing is the prompt itself."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: prompt {number} is not an object")
    prompt = row.get("prompt")
    attacked = row.get("adversarial_prompt") or prompt
    label = row.get("label")
    if not isinstance(prompt, str) or not prompt.strip() or not isinstance(attacked, str):
        raise DataError(f'{where}: prompt {number} needs a "prompt" that is a text')
    if label not in LABELS:
        raise DataError(f'{where}: the "label" of prompt {number} is {label!r}; it must be unsafe or safe')
    return Item(
        f"{scenario}/{number:03d}", scenario, prompt, attacked, label, str(row.get("source") or ""),
        str(row["answer"]) if row.get("answer") else None,
    )  # fmt: skip


# The hub's layout -----------------------------------------------------------------------------------------------


def _table(rows: Sequence[Mapping[str, Any]], key: str, where: str) -> tuple[Scenario, list[Item]]:
    """One split: rules are read off the first row, and every row must repeat them."""
    if not rows:
        raise DataError(f"{where} has no rows")
    first = rows[0]
    lists = {kind: _columns(first, f"{kind}_spec_") for kind in ("safety", "behavioral")}
    for number, row in enumerate(rows):
        if any(_columns(row, f"{kind}_spec_") != rules for kind, rules in lists.items()):
            raise DataError(f"{where}: row {number} has other rules than row 0; a table holds one scenario")
    scenario = Scenario(
        key,
        str(first.get("scenario") or key),
        str(first.get("scenario_description") or ""),
        numbered("safety", lists["safety"], where),
        numbered("behavioral", lists["behavioral"], where),
    )
    return scenario, [item_of(key, i, row, where) for i, row in enumerate(rows)]


def _columns(row: Mapping[str, Any], prefix: str) -> list[str]:
    """The rules of a row, by the number in the column's name; empty ones are not there."""
    named = ((int(name.removeprefix(prefix)), text) for name, text in row.items() if name.startswith(prefix))
    return [str(text) for _, text in sorted(named) if text]


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
            return rows
        if path.suffix == ".jsonl":
            return [row for _, row in objects(path, DataError, "a prompt with its rules")]
        return list(loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow; {install('eval')}") from None


def _hub(name: str) -> Found:
    """The splits of a data set on the hub."""
    try:
        import datasets

        splits = datasets.load_dataset(name)
    except ImportError:
        raise DataError(f"reading from the hub needs the package datasets; {install('eval')}") from None
    except Exception as error:  # of many kinds, none of them our own
        why = " ".join(str(error).split())[:200]
        raise DataError(f"{name!r} is no folder and cannot be read from the hub ({why})") from None
    return [_table(list(rows), split, f"{name}, split {split}") for split, rows in splits.items()]
