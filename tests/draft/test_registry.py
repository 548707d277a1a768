"""Names, options and errors of the registry."""

import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.draft import registry
from paceline.draft.base import Drafter
from paceline.draft.fallback import Fallback
from paceline.draft.methods.mirror import stateless_drafter
from paceline.draft.methods.none import NoDraft
from paceline.draft.methods.prompt_lookup import PromptLookup
from paceline.draft.methods.sam import Sam
from paceline.draft.registry import create, describe, names
from paceline.draft.spec import Options, Part, cut, exchanged, option, parse, quoted, split
from paceline.errors import MethodError


@dataclass(frozen=True)
class ParrotConfig(Options):
    checkpoint: str
    width: int = option(3, "tokens", least=1, in_front=1)
    rate: float = option(0.5, least=0, most=1)
    depth: int | None = option(None, least=2)
    cold: float = option(0.0, most=2.5)
    loud: bool = False
    title: str = "polly"
    mode: Literal["repeat", "reverse"] = "repeat"
    limit: int | None = None
    share: Literal["all"] | float = 1.0


class Parrot(Drafter):
    """Says it again.

    More about it."""

    name = "parrot"
    Config = ParrotConfig

    def __init__(self, config):
        self.config = config


class Perch(Drafter):
    """Takes a checkpoint or leaves it."""

    @dataclass(frozen=True)
    class Config:
        checkpoint: str = ""

    def __init__(self, config):
        self.config = config


class NotADrafter:
    pass


def entry(name, value):
    return EntryPoint(name, value, registry.GROUP)


ask_each_time = registry.added.__wrapped__


@pytest.fixture
def third_party(monkeypatch):
    """Register drafters as an installed package would."""

    def register(*entries):
        monkeypatch.setattr(registry, "entry_points", lambda group: [e for e in entries if e.group == group])
        monkeypatch.setattr(registry, "added", ask_each_time)

    register(entry("parrot", f"{__name__}:Parrot"), entry("perch", f"{__name__}:Perch"))
    return register


def test_built_in_names():
    assert {"none", "prompt-lookup", "sam"} <= set(names())
    assert type(create("none")) is NoDraft
    assert type(create("prompt-lookup")) is PromptLookup
    assert type(create("sam")) is Sam


@pytest.mark.parametrize("name", names())
def test_every_method_says_what_it_is(name):
    info = describe(name)
    assert info.name == name
    assert info.summary.endswith(".")
    assert info.lossless != "not stated" != info.paper
    assert all(option.help for option in info.options)
    if info.checkpoint != "required":
        assert create(name).name == name


def test_options_reach_the_config():
    drafter = create("sam,draft=7,grow=1.5")
    assert (drafter.config.draft, drafter.config.grow) == (7, 1.5)
    assert drafter.config.min_match == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("width=12", 12),
        ("rate=2e-1", 0.2),
        ("loud=yes", True),
        ("loud=0", False),
        ("title=a, b = c", "a, b = c"),
        ("mode=reverse", "reverse"),
        ("limit=4", 4),
        ("limit=none", None),
        ("share=all", "all"),
        ("share=0.25", 0.25),
    ],
)
def test_values_are_read_by_the_field_s_type(third_party, option, value):
    read = getattr(create(f"parrot:x,{option}").config, option.partition("=")[0])
    assert read == value
    assert type(read) is type(value)


def test_describe_reads_the_config(third_party):
    info = describe("parrot")
    assert info.summary == "Says it again."
    assert (info.lossless, info.paper, info.checkpoint) == ("not stated", "not stated", "required")
    options = {option.name: option for option in info.options}
    assert list(options) == ["width", "rate", "depth", "cold", "loud", "title", "mode", "limit", "share"]
    width = options["width"]
    assert (width.type, width.default, width.help, width.in_front) == ("int", 3, "tokens", 1)
    assert (options["mode"].type, options["mode"].choices) == ("choice", ("repeat", "reverse"))
    assert (options["limit"].type, options["limit"].default) == ("int or none", None)
    assert (options["share"].type, options["share"].choices) == ("choice or float", ("all",))
    assert describe("perch").checkpoint == "optional"
    assert describe("none").options == ()


@pytest.mark.parametrize("path", ["model", "./c++/model", "/data/a,b/model", "C:\\models\\x", "hub/name", "a+/b"])
def test_checkpoints_are_paths(third_party, path):
    assert create(f"parrot:{path}").config.checkpoint == path
    assert create(f"parrot:{path},width=2").config.checkpoint == path
    assert create(f"parrot:{path},width=2").config.width == 2
    both = create(f"parrot:{path}+sam")
    assert isinstance(both, Fallback)
    assert both.parts[0].config.checkpoint == path


def test_plus_makes_a_fallback():
    drafter = create("sam,draft=5 + prompt-lookup,draft=3+none")
    assert isinstance(drafter, Fallback)
    assert [type(part) for part in drafter.parts] == [Sam, PromptLookup, NoDraft]
    assert [drafter.parts[0].config.draft, drafter.parts[1].config.draft] == [5, 3]
    assert drafter.name == "sam+prompt-lookup+none"


def test_in_front_of_another_drafter_an_option_may_have_another_default(third_party):
    assert create("sam+none").parts[0].config.min_match == 5
    assert create("sam,min_match=2+none").parts[0].config.min_match == 2
    assert create("none+sam").parts[1].config.min_match == 1
    assert create("parrot:x+none").parts[0].config.width == 1


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("samm", "There is no drafter 'samm'. Did you mean 'sam'? Drafters: none, prompt-lookup, sam"),
        ("prompt_lookup", "Did you mean 'prompt-lookup'?"),
        ("SAM", "Did you mean 'sam'?"),
        ("sam+sma", "There is no drafter 'sma'"),
        ("sam+", "There is no drafter 'sam+'. Did you mean 'sam'?"),
        ("", "There is no drafter ''. Drafters: none"),
        ("sam,graw=3", "sam has no option 'graw'. Did you mean 'grow'? Its options: draft, min_match, grow"),
        ("none,draft=3", "none has no option 'draft'. It has no options."),
        ("sam,draft=many", "sam: draft is 'many'; it must be a whole number."),
        ("sam,draft=1.5", "sam: draft is '1.5'; it must be a whole number."),
        ("sam,draft=", "sam: draft is ''; it must be a whole number."),
        ("sam,grow=fast", "sam: grow is 'fast'; it must be a number."),
        ("jacobi,match=recnt", "jacobi: match is 'recnt'; it must be earliest or recent. Did you mean 'recent'?"),
        ("sam,draft=1,draft=2", "sam: option draft is given twice"),
        ("sam,draft", "an option is written key=value"),
        ("sam:weights", "sam takes no checkpoint, but 'weights' is given"),
        ("sam:", "sam takes no checkpoint"),
        ("sam,checkpoint=x", "sam has no option 'checkpoint'"),
        ("parrot", "parrot needs a checkpoint: write parrot:PATH."),
        ("parrot:", "parrot needs a checkpoint: write parrot:PATH."),
        ("parrot,checkpoint=x", "parrot needs a checkpoint: write parrot:PATH."),
        ("parrot:x,checkpoint=y", "parrot has no option 'checkpoint'"),
        ("parrot:x,loud=maybe", "parrot: loud is 'maybe'; it must be true or false."),
        ("parrot:x,limit=few", "parrot: limit is 'few'; it must be none or a whole number."),
        ("parrot:x,width=0", "parrot: width is 0; it must be 1 or more."),
        ("parrot:x,rate=1.5", "parrot: rate is 1.5; it must be 0 to 1."),
        ("parrot:x,rate=nan", "parrot: rate is nan; it must be 0 to 1."),
        ("parrot:x,cold=3", "parrot: cold is 3.0; it must be at most 2.5."),
        ("parrot:x,depth=1", "parrot: depth is 1; it must be 2 or more."),
        ("parrot:x,share=most", "parrot: share is 'most'; it must be all or a number."),
    ],
)
def test_errors_say_what_exists(third_party, spec, says):
    with pytest.raises(MethodError) as error:
        create(spec)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_ranges_hold_for_configs_made_in_python():
    with pytest.raises(MethodError, match=r"^ParrotConfig: width is 0; it must be 1 or more\.$"):
        ParrotConfig("x", width=0)
    assert ParrotConfig("x", rate=0, depth=None, cold=2.5).width == 3


def test_third_parties_register_by_entry_point(third_party):
    assert names()[-2:] == ["parrot", "perch"]
    assert type(create("perch")) is Perch


@pytest.mark.parametrize("entries", [["sam"], ["mine", "mine"]])
def test_two_drafters_of_one_name(third_party, entries):
    third_party(*(entry(name, f"{__name__}:Perch") for name in entries))
    with pytest.raises(MethodError, match=f"Two drafters are called {entries[0]!r}: .* and {__name__}:Perch"):
        names()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no_such_package.x:Y", "cannot be imported: No module named 'no_such_package'"),
        (f"{__name__}:NoSuchClass", "cannot be imported"),
        (f"{__name__}:NotADrafter", "is not a subclass"),
        (f"{__name__}:entry", "is not a subclass"),
    ],
)
def test_a_broken_third_party(third_party, value, says):
    third_party(entry("mine", value))
    with pytest.raises(MethodError, match=says):
        create("mine")
    assert create("none").name == "none"


def test_a_method_of_ours_that_is_not_installed(monkeypatch):
    """Where the engine is not installed."""
    monkeypatch.setitem(sys.modules, "paceline.draft.methods.recycling", None)
    with pytest.raises(MethodError, match=r"^Drafter 'recycling' runs beside a model and is not installed; .* \."):
        create("recycling")


# Quotes --------------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.sampled_from('ab1=:+>,;|"\\ \n\u00e9'), min_size=1, max_size=12)


@given(TEXTS, TEXTS)
@example("x+sam", "a+b")
def test_any_value_can_be_written(path, title):
    spec, sam = f"parrot:{quoted(path)},title={quoted(title)}", Part("sam", None, {})
    parrot = Part("parrot", path, {"title": title})
    assert [parse(part) for part in split(f"{spec} + sam +{spec}")] == [parrot, sam, parrot]
    within = parse(f"auto:sam|{exchanged(spec, ',', ';')}|{exchanged(spec, ',', ';')},table=t")
    listed = [parse(exchanged(part, ";", ",")) for part in cut(str(within.checkpoint), r"\|")]
    assert (listed, within.options) == ([sam, parrot, parrot], {"table": "t"})


@pytest.mark.parametrize("path", ["runs/a+b", "a,b=c", 'a"b', "a|b;c", "c:\\d+e"])
@pytest.mark.parametrize(
    "spec",
    ["model:{0},draft=3", "sam+model:{0},draft=3", "model:{0},draft=3+sam", "auto:sam|model:{0};draft=3,table=t"],
)
def test_a_path_in_quotes_is_the_path(spec, path):
    drafter = create(spec.format(quoted(path)))
    (model,) = [part for part in (drafter.parts or [drafter]) if part.name == "model"]
    assert (model.config.checkpoint, model.config.draft) == (path, 3)


def test_a_path_that_was_cut_is_said_to_want_quotes():
    with pytest.raises(MethodError, match=r"no drafter 'b'.* A path with a \+ in it is put in double quotes"):
        create("model:runs/a+b")


@pytest.mark.parametrize("path", ['"runs/a+b"', 'model:"runs/a+b"', 'model:"runs/a+b",candidates=2'])
def test_mirror_takes_a_path_or_a_drafter_in_quotes(path):
    _, drafter = stateless_drafter(create(f"mirror:{path}").config)
    assert drafter.config.checkpoint == "runs/a+b"
