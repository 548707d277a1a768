"""Our engine as a backend: prefixes, what is remembered within an item, and prompts that begin alike."""

import asyncio
from functools import cache
from itertools import pairwise

import pytest

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.prefixes import common
from paceline.errors import ModelError
from paceline.evals.align import sample
from paceline.evals.align.backend import Request
from paceline.evals.align.local import local_backend
from paceline.evals.align.methods import Setting, Task, read_methods
from paceline.evals.align.options import Decoding
from paceline.net.completion import CompletionError
from tests import models, native
from tests.evals.fakes import complete


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model with room for rules."""
    return models.make("llama2", tmp_path_factory.mktemp("model"), max_position_embeddings=4096, seed=1, **native.TINY)


def turns(text):
    return ({"role": "user", "content": text},)


def ask(backend, *requests):
    """One after another."""

    async def each():
        return [await complete(backend, request) for request in requests]

    return asyncio.run(each())


METHODS = "align3,self-refine,iterations=1,more-think,passes=2"


@cache
def written(folder, **options):
    """What each of METHODS makes of two items of the sample, greedily."""

    async def each():
        backend = local_backend(str(folder), dtype="float32", batch=1, **options)
        made = []
        try:
            for scenario, items in sample.read()[:1]:
                for item in items[:2]:
                    for method in read_methods(METHODS):
                        task = Task(item, scenario, backend, Setting(Decoding(16, 0.0)), item.id)
                        made.append(await method(task))
        finally:
            await backend.close()
        return made

    return asyncio.run(each())


def test_a_prefix_is_prefilled_and_gone_on_from(model):
    backend = local_backend(str(model), reuse=False, batch=1, dtype="float32")
    request = Request(turns("the cat"), Decoding(12, 0.0), "answer", "x", prefix="and the dog", forced="dog")
    (reply,) = ask(backend, request)
    engine = Engine(str(model), dtype="float32")
    prompt = [*engine.tokenizer.encode_chat(turns("the cat")), *engine.tokenizer.encode_text("and the dog")]
    (wanted,) = engine.generate([prompt], SamplingParams(max_tokens=12))
    assert reply.text == wanted.text
    assert (reply.call.prefilled, reply.call.generated) == (len(prompt), wanted.new_tokens)
    assert reply.call.injected == len(engine.tokenizer.encode_text("dog"))
    asyncio.run(backend.close())


def test_exact_reaches_the_engine(model):
    for exact in (False, True):
        backend = local_backend(str(model), batch=1, dtype="bfloat16", exact=exact)
        assert backend.endpoint.engine.target.exact == exact
        asyncio.run(backend.close())


def test_a_prefix_that_repeats_a_reply_is_made_of_its_very_tokens(model):
    backend, rows = local_backend(str(model), batch=1, dtype="float32"), []
    add = backend.endpoint.engine.add
    backend.endpoint.engine.add = lambda *asked: (rows.append(add(*asked)), rows[-1])[1]
    (reply,) = ask(backend, Request(turns("the cat"), Decoding(20, 0.0), "answer", "x"))
    ask(backend, Request(turns("the cat"), Decoding(4, 0.0), "answer", "x", prefix=reply.text + " more"))
    first, later = rows
    assert common(later.tokens[: later.prompt_length], first.tokens) >= len(first.tokens) - 1
    assert later.prompt_length > len(first.tokens)
    asyncio.run(backend.close())


def test_drafts_and_shared_prefixes_change_no_answer(model):
    plain, drafted = written(model, draft="none", reuse=False), written(model, draft="suffix,past=4000")
    assert [(g.response, g.thought) for g in drafted] == [(g.response, g.thought) for g in plain]
    calls = [call for made in drafted for call in made.calls]
    assert sum(call.speculation["draft_tokens"] for call in calls if call.speculation) > 0
    assert sum(call.cached or 0 for call in calls) > 0


def test_later_steps_prefill_what_is_new_alone(model):
    for made in written(model, draft="suffix,past=4000")[::3]:  # by align3
        assert len(made.calls) > 2
        for before, after in pairwise(made.calls):
            assert after.cached >= before.prefilled + before.generated - 2
            # What is run: the forced text, and the token or two between what was written and it.
            assert after.prefilled - after.cached <= after.injected + 3
    for made in written(model, draft="none", reuse=False):
        assert all(call.cached == 0 for call in made.calls)


def test_a_scope_remembers_and_others_do_not(model):
    request = Request(turns("the cat and the dog sat"), Decoding(40, 0.0), "answer", "a")
    again = Request(request.messages, request.decoding, "answer", "b")

    def rounds(requests):
        backend = local_backend(str(model), "suffix,past=4000", batch=1, dtype="float32")
        replies = ask(backend, *requests)
        asyncio.run(backend.close())
        assert len({reply.text for reply in replies}) == 1
        return [reply.call.speculation["rounds"] for reply in replies if reply.call.speculation]

    first, second = rounds([request, request])
    assert second < first / 2  # it has said that before
    alone, other = rounds([request, again])
    assert (alone, other) == (first, first)


def test_many_at_once_answer_like_one_by_one(model):
    requests = [Request(turns(f"number {n}"), Decoding(16, 0.0), "answer", str(n)) for n in range(9)]

    async def at_once():
        backend = local_backend(str(model), "suffix,past=4000", batch=4, dtype="float32")
        replies = await asyncio.gather(*(complete(backend, one) for one in requests))
        await backend.close()
        return [reply.text for reply in replies]

    backend = local_backend(str(model), "none", reuse=False, batch=1, dtype="float32")
    assert asyncio.run(at_once()) == [reply.text for reply in ask(backend, *requests)]
    asyncio.run(backend.close())


def test_seeds_make_samples_that_differ_and_repeat(model):
    def samples():
        backend = local_backend(str(model), batch=1, dtype="float32")
        wish = Decoding(16, 1.0, seed=3)
        texts = [r.text for r in ask(backend, *[Request(turns("go"), wish, "a", "a", sample=n) for n in range(3)])]
        asyncio.run(backend.close())
        return texts

    assert (samples(), len(set(samples()))) == (samples(), 3)


def test_a_request_that_nobody_waits_for_leaves_the_batch(model):
    async def leave():
        backend = local_backend(str(model), batch=1, dtype="float32")
        task = asyncio.create_task(backend.complete(Request(turns("the cat"), Decoding(3000, 0.0), "answer")))
        while not backend.endpoint.engine.rows:
            await asyncio.sleep(0.01)
        task.cancel()
        while backend.endpoint.engine.rows:
            await asyncio.sleep(0.01)
        await backend.close()
        return backend.endpoint.engine.rounds

    assert asyncio.run(asyncio.wait_for(leave(), 60)) < 3000


def test_a_prompt_that_is_too_long_fails_alone(model):
    backend = local_backend(str(model), batch=1, dtype="float32")
    with pytest.raises(CompletionError, match="context"):
        ask(backend, Request(turns("long " * 5000), Decoding(4, 0.0), "answer"))
    assert ask(backend, Request(turns("short"), Decoding(4, 0.0), "answer"))[0].call.generated == 4
    asyncio.run(backend.close())


def test_a_model_without_a_chat_template_is_refused(model, tmp_path):
    models.make("llama2", tmp_path)
    for file in tmp_path.glob("*template*"):
        file.unlink()
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"chat_template"', '"was_a_template"'))
    with pytest.raises(ModelError, match="chat template"):
        local_backend(str(tmp_path))
