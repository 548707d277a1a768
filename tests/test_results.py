"""docs/results: its tables are what `benchmarks/results.py` prints of the record, and the record what runs hold."""

import json
from argparse import Namespace

import pytest
import torch
from benchmarks import results
from safetensors.torch import save_file

from paceline.formats.folder import fingerprint
from tests.bench.runs import make_run
from tests.paths import REPOSITORY

RESULTS = REPOSITORY / "docs" / "results"


@pytest.fixture
def printed(capsys):
    """What the command prints for its arguments."""

    def run(*arguments):
        assert results.main(arguments) == 0
        return capsys.readouterr().out

    return run


def test_the_pages_are_what_the_command_prints(printed):
    page = (RESULTS / "README.md").read_text("utf-8")
    assert page.split(results.BEGIN)[1].split(results.END)[0] == printed("table").lstrip("\n")
    assert (RESULTS / "runs.md").read_text("utf-8") == printed("full")
    assert (RESULTS / "heads.md").read_text("utf-8") == printed("heads")


def test_runs_become_a_record_and_tables(tmp_path, printed, monkeypatch):
    monkeypatch.setattr(results, "RECORD", tmp_path / "runs.json")
    methods = {"none": 1.0, "sam": 1.25, "rest:/a/corpus-qwen": 0.9, "peer:llama-cpp:/models/q.gguf": 0.75}
    for name in ("qwen-q4-spec-bench", "qwen-q4-code-edits", "qwen-q4-spec-bench-sampled", "smollm2-q4-spec-bench-b4"):
        make_run(tmp_path / name, methods, not_installed={"peer:xllamacpp:/models/q.gguf,spec=ngram-mod": "not there"})
    (tmp_path / "README.md").write_text(f"before {results.BEGIN}old\n{results.END} after")
    assert "holds 4 runs" in printed("collect", str(tmp_path))
    assert (tmp_path / "README.md").read_text() == f"before {results.BEGIN}{printed('table')}{results.END} after"
    assert (tmp_path / "runs.md").read_text() == printed("full")
    lines = printed("table").splitlines()
    assert lines[0] == "### AMX: Some Xeon (amx)"
    lines = lines[2:]
    assert lines[0] == "| Qwen2.5-Coder-1.5B, Q4_K_M; 2026-11-27, commit 0123abcd | Spec-Bench | Code edits |"
    assert lines[2] == "| `sam` | 1.25 (1.20 to 1.31), 1.50 a round | 1.25 (1.20 to 1.31), 1.50 a round |"
    assert [line.split("`")[1] for line in lines[2:6]] == ["sam", "none", "rest", "peer:llama-cpp"]
    whole = printed("full")
    assert whole.count("\n## ") == 4
    assert "| `peer:xllamacpp,spec=ngram-mod` | not there |" in whole
    assert "| `sam` | 1.25 (1.20 to 1.31) | 1.38 | 1.50 | 600.0 |" in whole
    make_run(tmp_path / "other" / "qwen-q4-humaneval", methods)
    assert "holds 5 runs" in printed("collect", str(tmp_path / "other"))
    assert "commit 0123abcd | Spec-Bench | HumanEval | Code edits |" in printed("table"), "kept"
    newer = {"level": "avx512", "started": "2026-11-28T10:00:00+00:00"}
    for name in ("qwen-q4-code-edits", "qwen-q4-humaneval"):
        make_run(tmp_path / "newer" / name, methods, change=lambda about, _: about["environment"].update(newer))
    assert "holds 7 runs" in printed("collect", str(tmp_path / "newer"))
    new, old = printed("table").split("### AMX")
    assert new.startswith("### AVX-512: Some Xeon (avx512)")
    assert "an older version" in old
    assert "an older version" not in new
    later = newer | {"started": "2026-11-29T10:00:00+00:00"}
    change = lambda about, _: about["environment"].update(later)  # noqa: E731
    make_run(tmp_path / "later" / "qwen-q4-humaneval", {"none": 1.0, "sam": 1.5, "suffix": 1.2}, change=change)
    assert "holds 8 runs" in printed("collect", str(tmp_path / "later"))
    row = "| avx512/qwen-q4-humaneval | `sam` | 1.25 (2026-11-28) | 1.50 (2026-11-29) | 1.20 |"
    assert printed("again").splitlines()[2:] == [row]
    assert (tmp_path / "runs.md").read_text().endswith(f"{row}\n")
    table = printed("table").split("### AMX")[0]
    (sam,) = [line for line in table.splitlines() if line.startswith("| `sam` |")]
    assert "| 1.50" in sam, "the newest day's is the table's"
    assert "`suffix` | 1.20" in table, "which the first day had not"
    assert "`peer:llama-cpp` | 0.75" in table, "which the later day had not"


def test_trained_drafters_stand_beside_their_papers(tmp_path, printed, monkeypatch):
    """What a drafter of a speed-up s accepts is 1.2 s a round here."""
    monkeypatch.setattr(results, "RECORD", tmp_path / "runs.json")
    for name, tokens in (("eagle3", 7000), ("eagle", 7000), ("draft", 5000)):
        depths = [{"accepted": 0.5, "sampled": 0.25, "overlap": 0.625}] * (2 if name == "draft" else 5)
        config = {"held_out": {"all": depths}, "recipe": {"spent": {"tokens": tokens, "minutes": 6.04}}}
        config |= {"draft_vocab_size": 4} if name == "eagle3" else {}
        (tmp_path / f"smollm2-{name}").mkdir()
        (tmp_path / f"smollm2-{name}" / "config.json").write_text(json.dumps(config))
        save_file({"weight": torch.ones(2, 2)}, tmp_path / f"smollm2-{name}" / "model.safetensors")
    eagle3, eagle, draft = (f"{tmp_path}/smollm2-{name}" for name in ("eagle3", "eagle", "draft"))
    vocab = f"vocab={tmp_path}/smollm2-vocab.safetensors"
    fixed, svip = f"model:{draft},stop=fixed,draft=5,{vocab}", f"model:{draft},stop=svip,{vocab}"
    methods = {
        "none": 1.0, "sam": 1.3, f"eagle3:{eagle3}": 1.5, f"eagle:{eagle},{vocab}": 2.0, f"sam+eagle3:{eagle3}": 1.51,
        fixed: 1.0, svip: 1.4, f"model:{draft},stop=svip": 1.2,
    }  # fmt: skip
    make_run(tmp_path / "smollm2-heads-spec-bench-whole", methods)
    make_run(tmp_path / "smollm2-heads-spec-bench-sampled", {"none": 1.0, fixed: 1.2, svip: 1.0})
    (tmp_path / "README.md").write_text(f"before {results.BEGIN}old\n{results.END} after")
    printed("collect", str(tmp_path))
    assert results.BEGIN + results.END in (tmp_path / "README.md").read_text(), "the page of methods without training"
    page = printed("heads")
    assert (tmp_path / "heads.md").read_text() == page
    weights = fingerprint({"weight": torch.ones(2, 2)})
    places = "build/smollm2/draft", "build/smollm2/eagle", "models/smollm2-eagle3"
    assert f"<!-- measured with {', '.join(f'{place} {weights}' for place in places)} -->" in page
    assert "**They have not all read as many tokens.**" in page
    assert "| `build/smollm2/draft` | 5,000 | 6.0 | 0.625 |" in page
    greedy, sampled = (part.split("\n## ")[0] for part in page.split("\n## amx/smollm2-heads-")[1:])
    rows = {line.split("`")[1]: line.split(" | ")[1:] for line in greedy.splitlines() if line.startswith("| `")}
    assert list(rows)[:3] == ["eagle,vocab", "sam+eagle3", "eagle3"], "the most tokens first"
    figures = ["2.40", "1.88", "960.0", "2.00 (1.92 to 2.10)", "100%", "1", "3", "4.43"]
    assert rows["eagle,vocab"][:8] == figures, "1 + .5 + .25 + .125 in the second place"
    assert rows["eagle3"][5:9] == ["3", "1", "5.71", "3.02"]
    assert [rows[one][1] for one in ("model,stop=svip,vocab", "model,stop=svip", "sam+eagle3")] == ["1.75", "", ""]
    assert "- Published figures of `eagle,vocab`, `eagle3`: Spec-Bench's leaderboard" in greedy
    assert "its authors' own" not in sampled
    assert "| `model,stop=svip,vocab` | 1.20 | 1.50 | 480.0 |" in sampled, "1 + .25 + .25"


def test_a_claim_is_decided_by_intervals(tmp_path, printed, monkeypatch):
    """A method that needs two rounds where another needs three has 1.5 times its tokens a round."""
    monkeypatch.setattr(results, "RECORD", tmp_path / "runs.json")
    (tmp_path / "smollm2-draft").mkdir()
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "smollm2-draft" / "model.safetensors")
    (tmp_path / "smollm2-draft" / "config.json").write_text("{}")
    draft, vocab = f"model:{tmp_path}/smollm2-draft", f"vocab={tmp_path}/smollm2-vocab.safetensors"
    slow, fast = (f"{draft},stop=fixed,draft={length},{vocab}" for length in (5, 2))
    svip, whole = f"{draft},stop=svip,{vocab}", f"{draft},stop=svip"
    run = tmp_path / "smollm2-heads-spec-bench-whole"
    make_run(run, dict.fromkeys(("none", slow, fast, svip, whole), 1.0))
    answers = []
    for line in (run / "answers.jsonl").read_text("utf-8").splitlines():
        answer, task = json.loads(line), len(answers) // 10
        (turn,) = answer["turns"]
        if answer["method"] in (slow, fast):
            turn["lengths"] = [1, 1, *turn["lengths"][1:]]
        if answer["method"] == slow:
            turn["seconds"] *= 2
        if answer["method"] == whole:  # in half of the tasks more, in half less
            turn["lengths"] = [sum(turn["lengths"])] if task % 2 else [1, 1, *turn["lengths"][1:]]
        answers.append(json.dumps(answer) + "\n")
    (run / "answers.jsonl").write_text("".join(answers), "utf-8")
    (tmp_path / "README.md").write_text(f"before {results.BEGIN}old\n{results.END} after")
    printed("collect", str(tmp_path))
    held = printed("heads").split("## Does the published order hold?")[1].split("\n## ")[0]
    said = [[cell.strip() for cell in line.split("|")[3:-1]] for line in held.splitlines() if "smollm2-heads" in line]
    same = "no difference seen"
    assert said[0][:4] == [run.name.replace("smollm2", "amx/smollm2"), "`model,stop=fixed,draft=2,vocab`",
                           "1.50 (1.50 to 1.50)", "yes"], "the faster of the fixed lengths"  # fmt: skip
    assert said[0][4:] == ["1.00", ""], "too few questions for an interval of the speed"
    assert said[1][1] == "`model,stop=svip`"
    assert said[1][3] == same
    assert "not trained equally long" not in held
    record = json.loads((tmp_path / "runs.json").read_text())
    cards = record["amx/" + run.name]["cards"]
    cards["model,stop=svip,vocab"]["minutes"], cards["model,stop=fixed,draft=2,vocab"]["minutes"] = 74, 6.5
    (tmp_path / "runs.json").write_text(json.dumps(record))
    assert "| SVIP over the best fixed length, **not trained equally long** |" in printed("heads")
    low, high = said[1][2].partition("(")[2][:-1].split(" to ")
    assert float(low) < 1 < float(high)


def test_a_run_is_one_command_and_stops_when_it_is_interrupted(tmp_path, monkeypatch):
    asked = Namespace(
        runs=["qwen-q4-code-edits", "smollm2-q4-spec-bench-b4", "smollm2-heads-spec-bench-whole"],
        out=tmp_path, limit=2, max_tokens=9, qwen="q.gguf", smollm2="s.gguf", spec_bench="s", humaneval="h",
        code_edits="code-edits", demo="demo", heads=str(tmp_path), made=f"{tmp_path}/made", peer_python="x",
        llama_server=None,
    )  # fmt: skip
    for name in ("smollm2-eagle3", "smollm2-hydra", "made/dflash"):
        (tmp_path / name).mkdir(parents=True)
    commands = []
    statuses = iter((0, 0, 0, 1, 130))
    monkeypatch.setattr(results, "call", lambda words: commands.append(list(words)) or next(statuses))
    assert results.run(asked) == 0
    qwen, heads, smollm2 = (" ".join(words[3:]) for words in commands)
    assert qwen.startswith("bench q.gguf --dtype auto -n 9 --warm-up 1 --suite code-edits --out ")
    assert " --limit 2 -t 0.0 -b 1 -d suffix " in qwen
    assert qwen.endswith(" --peer xllamacpp:q.gguf,spec=ngram-mod --peer-python x")
    assert " -d prediction " in qwen
    assert "--dtype auto" in smollm2
    assert " -b 4 " in smollm2
    at, dflash = f"{tmp_path}/smollm2-eagle3", f"dflash:{tmp_path}/made/dflash"
    there = f" -b 1 --no-budget -d eagle3:{at} -d {dflash} -d {dflash},tree=0 -d sam+eagle3:{at} -d sam -d suffix"
    there += " --peer-python x"
    assert heads.endswith(there), "those whose files are there"
    assert results.run(asked) == 130
    assert len(commands) == 5
    asked.llama_server = "built/llama-server"
    assert not any("xllamacpp" in word for word in results.command(results.PLANS[0], asked))
    served, drafting = [word for word in results.command(results.PLANS[0], asked) if "llama-server" in word]
    assert served == "built/llama-server -m q.gguf -c 8192 --parallel 1 --no-cache-prompt --cache-ram 0 --port {port}"
    assert drafting == f"{served} --spec-type ngram-mod"
    assert results.label(f"peer:{drafting}") == "peer:llama-server,spec=ngram-mod"


def test_the_plan_names_each_run_once(printed):
    names = [line.split()[0] for line in printed("plan").splitlines()]
    assert len(set(names)) == len(names) == len(results.PLANS)
