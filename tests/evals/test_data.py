"""Reading data: the real counts, both layouts, scenarios of one's own, the sample, and what is refused."""

import json
from collections import Counter

import pytest

from paceline.errors import PacelineError
from paceline.evals.align import sample
from paceline.evals.align.data import read

COUNTS = {"Biochem": (11, 9), "Child": (12, 10), "Code": (11, 10), "Health": (9, 10), "Travel": (10, 11)}
"""Safety and behavioural rules of SpecBench's scenarios."""


@pytest.fixture
def specbench(shared):
    return shared / "data" / "specbench-alignment"


def test_specbench_has_what_its_paper_says(specbench):
    data = read(str(specbench))
    assert {k: (len(s.safety), len(s.behavioral)) for k, s in data.scenarios.items()} == COUNTS
    assert sum(len(s.rules) for s in data.scenarios.values()) == 103
    for key in COUNTS:
        labels = [i.label for i in data.items if i.scenario == key]
        assert labels == ["unsafe"] * 200 + ["safe"] * 100
    assert sum(i.answer is not None for i in data.items) == 250
    same = [i for i in data.items if i.label == "unsafe" and i.prompt == i.adversarial_prompt]
    assert (len(same), {i.source for i in same}) == (50, {"allenai/wildjailbreak"})
    assert data.scenarios["Child"].digest == read(str(specbench), ["Child"]).scenarios["Child"].digest


def test_the_hubs_layout_reads_the_same(specbench, tmp_path):
    wanted = read(str(specbench), ["Child"])
    scenario = wanted.scenarios["Child"]
    rows = []
    for item in wanted.items:
        row = {"adversarial_prompt": item.adversarial_prompt, "prompt": item.prompt, "label": item.label}
        row |= {"source": item.source, "answer": item.answer or "", "scenario": scenario.name}
        row |= {"scenario_description": scenario.description}
        row |= {f"safety_spec_{i}": scenario.safety[i - 1].text if i <= 12 else None for i in range(1, 13)}
        row |= {f"behavioral_spec_{i}": scenario.behavioral[i - 1].text if i <= 10 else "" for i in range(1, 12)}
        rows.append(row)
    (tmp_path / "Child.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read(str(tmp_path))
    assert (found.scenarios["Child"], found.items) == (scenario, wanted.items)


def test_parquet_reads_the_same(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    row = {"prompt": "q", "adversarial_prompt": "a", "label": "safe", "source": "s", "answer": None}
    row |= {"scenario": "Mine", "safety_spec_1": "s1", "safety_spec_2": None, "behavioral_spec_1": "b1"}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "Mine-00000-of-00001.parquet")
    data = read(str(tmp_path))
    assert [rule.text for rule in data.scenarios["Mine"].rules] == ["s1", "b1"]
    assert data.items[0].answer is None


YAML = """
name: Bread
description: About bread.
safety: [Never name a brand.]
behavioral:
  - {text: Two headings., weight: 2}
  - Answer as far as possible.
prompts:
  - {prompt: "Which flour is best?", adversarial_prompt: In a play, label: unsafe}
  - {prompt: "How is bread made?", label: safe, answer: With flour.}
"""


def test_own_scenarios(tmp_path):
    (tmp_path / "bread.yaml").write_text(YAML)
    yaml = read(str(tmp_path / "bread.yaml"))
    assert (yaml.scenarios["bread"].behavioral[0].weight, [i.label for i in yaml.items]) == (2, ["unsafe", "safe"])
    assert (yaml.items[0].adversarial_prompt, yaml.items[1].answer) == ("In a play", "With flour.")


@pytest.mark.parametrize(("text", "why"), [
    ("safety: [a]\nprompts: [{prompt: q, label: safe}]", "behavioral: Field required"),
    ("safety: [a]\nbehavioral: [b]", "prompts: Field required"),
    ("safety: [a]\nbehavioral: [b]\nprompts: [{prompt: q, label: other}]", "prompts.0.label: .*'unsafe' or 'safe'"),
    ("behavioral: [{text: b, weight: 0}]\nsafety: [a]\nprompts: [{prompt: q, label: safe}]", "weight: .* than 0"),
    ("[not, a, mapping]", "valid dictionary"),
    (": :\n - {", "expected <block end>"),
])
def test_broken_files_are_refused_in_a_line(tmp_path, text, why):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(PacelineError, match=why) as error:
        read(str(tmp_path / "mine.yaml"))
    assert "mine.yaml" in str(error.value)
    assert "_File" not in str(error.value)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(PacelineError, match="no data at"):
        read("nowhere")
    with pytest.raises(PacelineError, match="holds no scenarios"):
        read(str(tmp_path))
    with pytest.raises(PacelineError, match="Did you mean 'Museum'"):
        read("sample", ["Musem"])
    with pytest.raises(PacelineError, match="from 3 to"):
        read("sample,items=1000")


def test_the_sample_has_specbenchs_form():
    data = read("sample")
    assert [len(s.rules) for s in data.scenarios.values()] == [6, 6]
    for key in data.scenarios:
        mine = [i for i in data.items if i.scenario == key]
        assert [i.label for i in mine] == ["unsafe"] * 4 + ["safe"] * 2
        assert [i.answer is not None for i in mine] == [False] * 4 + [True, False]
        assert all(i.prompt != i.adversarial_prompt and i.prompt in i.adversarial_prompt for i in mine[:4])
    whole = read(f"sample,items={sample.MOST_ITEMS}").items
    assert len({i.adversarial_prompt for i in whole}) == len({i.id for i in whole}) == 2 * sample.MOST_ITEMS
    assert all(sample.topic(i) in i.prompt for i in whole)


def test_digests_are_the_same_in_every_run():
    data = read("sample")
    assert data.scenarios["Recipes"].digest == "d9a43f7696ece277"
    assert data.items[0].digest != data.items[1].digest


def test_references_of_the_sample_keep_its_rules():
    data = read("sample,items=60")
    for item in data.items:
        if item.answer is not None:
            marks = [sample.check(rule, item, item.answer) for rule in data.scenarios[item.scenario].rules]
            assert "NO" not in marks


def test_a_limit_keeps_proportions():
    items = read("sample,items=90", limit=60).items
    assert Counter((i.scenario, i.label) for i in items) == {
        ("Recipes", "unsafe"): 20, ("Recipes", "safe"): 10, ("Museum", "unsafe"): 20, ("Museum", "safe"): 10,
    }  # fmt: skip
