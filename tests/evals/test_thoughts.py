"""Where a thought begins: once, whether the chat template opens it or the method does, on both back ends."""

import asyncio

import pytest

from paceline.errors import PacelineError
from paceline.evals.align.backend import Backend, Request, continued
from paceline.evals.align.judge import ModelJudge
from paceline.evals.align.local import local_backend
from paceline.evals.align.methods import Setting, Task, read_methods
from paceline.evals.align.options import AlignOptions, Decoding
from paceline.evals.align.run import open_backend, open_judge
from paceline.net.endpoint import Remote
from paceline.net.keys import Keys
from paceline.target.load import load_tokenizer
from tests import models
from tests.evals.endpoint import Scripted
from tests.evals.fakes import item, scenario

OPENS = "<|assistant|><think>\n{% endif"
TEMPLATES = {
    "closed": models.CHAT_TEMPLATE,
    "opens": models.CHAT_TEMPLATE.replace("<|assistant|>{% endif", OPENS),
    "opens, no newline": models.CHAT_TEMPLATE.replace("<|assistant|>{% endif", OPENS.replace("\n", "")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.make("llama2", tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture(params=["local", "endpoint"])
def run(request, folder):
    """A method with a chat template on a back end."""
    return lambda method, template: BACK_ENDS[request.param](folder, method, TEMPLATES[template])


def on_local(folder, method, template):
    backend, prompts = local_backend(str(folder), dtype="float32", batch=1), list[str]()
    inner, add = backend.tokenizer.inner, backend.endpoint.engine.add
    inner.chat_template = template

    def noted(prompt, params):
        prompts.append(inner.decode(prompt))
        return add(prompt, params)

    backend.endpoint.engine.add = noted
    return asyncio.run(_asked(method, backend)), _turns(prompts)


def on_endpoint(folder, method, template):
    tokenizer = load_tokenizer(folder)
    tokenizer.inner.chat_template = template
    with Scripted(lambda body: "so it is") as server:
        made = asyncio.run(_asked(method, Backend(Remote(f"{server.url}#scripted"), "scripted", tokenizer=tokenizer)))
    rendered = [
        body["prompt"] if "prompt" in body else tokenizer.render_chat(body["messages"]) for body in server.requests
    ]
    return made, _turns(rendered)


BACK_ENDS = {"local": on_local, "endpoint": on_endpoint}


async def _asked(method, backend):
    (one,) = read_methods(method)
    try:
        return await one(Task(item(), scenario(1, 1), backend, Setting(Decoding(6, 0.0)), "scope"))
    finally:
        await backend.close()


def _turns(prompts):
    return [prompt.rpartition("<|assistant|>")[2] for prompt in prompts]


@pytest.mark.parametrize("method", ["zero-think", "more-think,passes=2", "align3,steps=21,close=true"])
def test_a_forced_thought_is_opened_once(run, method):
    first = set()
    for template in TEMPLATES:
        _, turns = run(method, template)
        assert turns
        for turn in turns:
            assert turn.startswith("<think>\n")
            assert turn.count("<think>") == 1
        first.add(turns[0])
    assert len(first) == 1


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_the_template_wrote_is_not_counted_as_injected(run, folder, template):
    made, turns = run("align3,steps=1", template)
    written = {"closed": "", "opens": "<think>\n", "opens, no newline": "<think>"}[template]
    forced = turns[0].removeprefix(written)
    assert made.calls[0].injected == len(load_tokenizer(folder).encode_text(forced))


@pytest.mark.parametrize("method", ["vanilla", "self-refine,iterations=1"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_reply_within_a_thought_that_the_template_opened_is_no_answer(run, template, method):
    made, turns = run(method, template)
    assert (made.unanswered is None) == (template == "closed")
    assert turns[0] == {"closed": "", "opens": "<think>\n", "opens, no newline": "<think>"}[template]


@pytest.mark.parametrize(("prompt", "prefix", "rest"), [
    ("u<think>\n", "<think>\nso", "so"),
    ("u<think>", "<think>\nso", "\nso"),
    ("u<think>\n\n", "<think>\nso", "so"),
    ("u<think>\n\n</think>\n\n", "<think>\nso", "<think>\nso"),  # an empty thought that is over
    ("about <think>\nu", "<think>\nso", "<think>\nso"),  # in a user's words
    ("u<think>\n", "an answer", "an answer"),
    ("u<think>\n", "", ""),
])
def test_what_a_template_has_written_is_left_out(prompt, prefix, rest):
    whole = continued(Request((), Decoding(), "a", prefix=prefix, forced=prefix), prompt)
    assert (whole.prefix, whole.forced) == (rest, rest)
    later = continued(Request((), Decoding(), "a", prefix=f"{prefix} and on", forced=" and on"), prompt)
    assert (later.prefix, later.forced) == (f"{rest} and on", " and on")


def test_another_model_that_judges_has_neither_the_tokenizer_nor_the_thoughts_of_the_one_under_test(folder):
    here, there = "http://127.0.0.1:9/v1#writer", "http://127.0.0.1:9/v1#judge"
    asked = AlignOptions(here, tokenizer=str(folder), thinking=True)

    async def opened():
        judges = [await open_judge(name, asked, {}) for name in ("self", there)]
        seen = []
        for judge in judges:
            assert isinstance(judge, ModelJudge)
            assert isinstance(judge.backend.endpoint, Remote)
            seen.append((judge.opened, judge.backend.tokenizer is not None))
            await judge.backend.close()
        return seen

    assert asyncio.run(opened()) == [(True, True), (False, False)]


def test_a_tokenizer_without_a_chat_template_is_refused(folder, tmp_path):
    tokenizer = load_tokenizer(folder).inner
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    url = "http://127.0.0.1:9/v1#writer"
    with pytest.raises(PacelineError, match="no chat template"):
        asyncio.run(open_backend(url, AlignOptions(url, tokenizer=str(tmp_path)), Keys()))
