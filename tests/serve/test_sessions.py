"""Conversations, turn by turn: how much of each prompt is there already, where a template rewrites what was said."""

from itertools import pairwise
from threading import Event
from time import monotonic, sleep

import httpx2 as httpx
import pytest

from paceline.core.sampling import SamplingParams
from paceline.draft.text import folder as text_folder
from paceline.engine.engine import Engine
from paceline.errors import Interrupted
from paceline.serve.ahead import WAITING, ReadAhead
from paceline.serve.chats import Chats
from tests import models
from tests.serve.live import engine, serving
from tests.serve.test_tools import TOOLS, writes  # noqa: F401

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ (m.content or '').split('</think>')[-1] }}{% for call in m.tool_calls or [] %}<tool_call>"
    '{{ \'{\' }}"name":    "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}{{ \'}\' }}'
    "</tool_call>{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
"""Invites thinking, drops it once it was said, and spells calls with spaces of its own."""
SYSTEM = {"role": "system", "content": "You mend programs and say what was wrong with them, in a few words. " * 3}
ANSWERS = {
    "thinking": ("Perhaps the cat. </think>It is the cat, which sat on the mat and saw the dog.", True),
    "a call": ('</think><tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>', True),
    "nothing to rewrite": ("It is the dog.", False),
}


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def folder(request, tmp_path_factory):
    """A dense model, and a hybrid."""
    return models.make(request.param, tmp_path_factory.mktemp("m") / "tiny", max_position_embeddings=4096)


class Client:
    """A client of one conversation. said: its messages."""

    def __init__(self, address):
        self.http, self.said = httpx.Client(base_url=address, timeout=60), [SYSTEM]

    def ask(self, content, role="user", **more):
        """(tokens of the prompt, how many of them were reused)."""
        call = (self.said[-1].get("tool_calls") or [{}])[0]
        self.said.append({"role": role, "content": content} | ({"tool_call_id": call["id"]} if role == "tool" else {}))
        body = {"messages": self.said, "temperature": 0, "max_tokens": 200, **more}
        made = self.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        answer, usage = made["choices"][0]["message"], made["usage"]
        self.said.append({name: answer[name] for name in ("role", "content", "tool_calls") if answer.get(name)})
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def counted(self):
        """Tokens that were read ahead, used and wasted."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith("paceline:read_ahead")]
        return [float(line.split()[1]) for line in lines]

    def read(self, before):
        """Wait until more was read ahead."""
        until = monotonic() + 30
        while self.counted()[0] <= before and monotonic() < until:
            sleep(0.02)
        return self.counted()


def test_each_turn_reuses_the_prompt_before_it(folder):
    made = engine(folder, ("none",))
    made.tokenizer.inner.chat_template = TEMPLATE
    with serving(made, read_ahead=False) as address:
        client, before = Client(address), 0
        for turn in range(5):
            prompt, reused = client.ask(f"Turn {turn}: and what of line {turn * 7}?", max_tokens=20)
            assert before - 64 <= reused <= before or not turn
            before = prompt
        _, reused = Client(address).ask("Something else.")
        assert reused > 60, "the system message"
        assert client.counted() == [0, 0, 0]


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_the_template_rewrites_is_read_ahead(folder, writes, answer):  # noqa: F811
    text, is_rewritten = ANSWERS[answer]
    made = engine(folder, ("none",))
    made.tokenizer.inner.chat_template = TEMPLATE
    if not is_rewritten:
        made.tokenizer.inner.chat_template = TEMPLATE.replace("<think>\n", "")
    with serving(made) as address:
        client, answers = Client(address), []
        for turn in range(3):
            writes(text)
            role = "tool" if turn and answer == "a call" else "user"
            before = client.counted()
            answers.append(client.ask(f"And what of line {turn * 7}?", role, tools=TOOLS))
            after = client.read(before[0]) if is_rewritten else client.counted()
            assert after[1] > before[1] or not turn or not is_rewritten
        for (before, _), (prompt, reused) in pairwise(answers):
            new = len(made.tokenizer.encode_text("And what of line 14?</s><|assistant|><think>\n"))
            assert prompt - reused <= new
            assert reused > before - 16
        read, used, wasted = client.counted()
        assert used + wasted <= read
        assert (wasted, read > 0) == (0, is_rewritten)


def test_a_request_ends_it_between_two_layers_and_it_goes_on_later(folder):
    made, alone = engine(folder, ("none",)), engine(folder, ("none",))
    text, asked = [(7 * i) % 250 + 4 for i in range(900)], 0

    def is_idle():
        nonlocal asked
        asked += 1
        return asked != 7

    ahead = ReadAhead(made, is_idle)
    assert not ahead.work()
    ahead.put(text, SamplingParams())
    assert ahead.work()
    first = ahead.read
    assert 0 < first < len(text)
    assert not made.has_work
    wish = SamplingParams(max_tokens=8)
    assert made.generate([text[:50]], wish)[0].tokens == alone.generate([text[:50]], wish)[0].tokens
    assert ahead.work()
    assert len(text) - 50 <= ahead.read <= len(text), "the other request may have left some of it"
    assert not ahead.work()
    row = made.add([*text, 5, 6], wish)
    made.finish([row])
    ahead.ended(row)
    assert row.reused == len(text)
    assert row.tokens[-8:].tolist() == alone.generate([[*text, 5, 6]], wish)[0].tokens
    assert (ahead.used, ahead.wasted) == (ahead.read, 0)


def test_what_nobody_asks_for_is_wasted(folder):
    made = engine(folder, ("none",))
    ahead = ReadAhead(made, lambda: True)
    for turn in range(70):
        ahead.put([turn + 4, *range(9, 40)], SamplingParams())
        assert ahead.work()
    assert (ahead.read, ahead.used, ahead.wasted) == (70 * 32, 0, 6 * 32)
    row = made.add([60, *range(9, 40), 5], SamplingParams(max_tokens=1))
    made.finish([row])
    ahead.ended(row)
    assert (ahead.used, ahead.wasted) == (32, 6 * 32), "one of many"
    ahead.put([5] * 5000, SamplingParams())
    assert ahead.work(), "and a conversation that no longer fits is passed over"
    assert ahead.read == 70 * 32


def test_answers_copy_from_a_folder_that_only_who_has_a_key_may_choose(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(text_folder, "SECONDS", 0.0)
    for name in ("first", "second/inner", "third"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "first" / "a.txt").write_text("the cat sat on the mat")
    (tmp_path / "second" / "inner" / "a.txt").write_text("the dog sat")
    made, taken = engine(folder, ("suffix",)), []

    def add(prompt, params):
        taken.append(params.corpus)
        return Engine.add(made, prompt, params)

    monkeypatch.setattr(made, "add", add)
    roots = (str(tmp_path / "first"), str(tmp_path / "second"))
    with (
        serving(made, corpora=roots, api_keys=("key",), protect_all=True) as address,
        httpx.Client(base_url=address, timeout=60) as http,
    ):

        def ask(where=None, status=200):
            headers = {"x-api-key": "key"} | ({"x-paceline-corpus": str(where)} if where else {})
            body = {"prompt": "the", "max_tokens": 3}
            reply = http.post("/v1/completions", json=body, headers=headers)
            assert reply.status_code == status
            return reply.json()

        def until(where, text):
            wanted = made.tokenizer.encode_text(text)
            for _ in range(500):
                ask(where)
                if taken[-1] is not None and taken[-1].text[:-1].tolist() == wanted:
                    return True
                sleep(0.02)
            return False

        assert until(None, "the cat sat on the mat")
        assert until(tmp_path / "second" / "inner", "the dog sat")
        assert until(None, "the cat sat on the mat")
        for name in "abcdef":  # each client has a few of its own, and the one used longest ago is forgotten
            (tmp_path / "second" / name).mkdir()
            ask(tmp_path / "second" / name)
        assert until(tmp_path / "second" / "inner", "the dog sat")
        odd = (tmp_path / "first" / "none", "~nobody-of-this-name/x", tmp_path / "first" / ("x" * 5000), "x/" * 900)
        for where in (tmp_path / "third", tmp_path, tmp_path / "first" / ".." / "third", "/", *odd):
            assert "must name a folder of --corpus" in ask(where, 400)["error"]["message"]
    with serving(engine(folder, ("suffix",)), corpora=roots) as address:
        reply = httpx.post(f"{address}/v1/completions", json={"prompt": "the"}, headers={"x-paceline-corpus": roots[0]})
        assert (reply.status_code, "needs an API key" in reply.text) == (400, True)


def test_a_conversation_that_cannot_go_on_is_given_up(folder, monkeypatch):
    made = engine(folder, ("none",))
    ahead = ReadAhead(made, lambda: True)
    ahead.put(list(range(9, 80)), SamplingParams())
    monkeypatch.setattr(made.seats, "ready", lambda rows: [])
    assert ahead.work()
    assert not ahead.work()
    assert (ahead.read, made.rows) == (0, [])


def test_many_conversations_at_once_are_not_all_rendered(folder, writes, monkeypatch):  # noqa: F811
    """Only as many wait as are read ahead, and one that cannot be rendered costs nobody anything."""
    made, rendered, open_ = engine(folder, ("none",), max_batch=8), [], Event()

    def next_prompt(*_):
        rendered.append(1)
        open_.wait(30)
        raise ValueError("a bug")

    monkeypatch.setattr(Chats, "next_prompt", next_prompt)
    writes("Ho.")
    with serving(made) as address:
        client = Client(address)
        for _ in range(12):
            client.ask("Hi")
            client.said = client.said[:1]
        sleep(0.2)
        assert len(rendered) == 1
        open_.set()
        until = monotonic() + 10
        while len(rendered) < WAITING and monotonic() < until:
            sleep(0.02)
        sleep(0.2)
        assert len(rendered) == WAITING
        client.ask("And now?", max_tokens=2)


def test_a_grammar_of_the_answer_says_nothing_of_the_next_prompt(folder):
    ahead = ReadAhead(engine(folder, ("none",)), lambda: True)
    ahead.put(list(range(9, 80)), SamplingParams(min_tokens=50, max_tokens=60, seed=3, cache_salt="mine"))
    assert ahead.work()
    assert ahead.read == 71


def test_a_forward_of_few_tokens_ends_between_two_layers_too(folder):
    """Not after all of them, as a recorded one does."""
    made, asked = engine(folder, ("none",)), []
    made.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
    made.target.is_interrupted = lambda: bool(asked.append(1) or len(asked) > 1)
    row = made.add([5, 6, 7], SamplingParams(max_tokens=4))
    with pytest.raises(Interrupted):
        made.step()
    assert (len(asked), row.num_new) == (2, 0)
    made.target.is_interrupted = None
    made.finish([row])
    assert row.num_new == 4
