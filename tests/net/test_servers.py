"""Running servers over HTTP: what they say of themselves, the requests of logs, and requests sent under a load."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest

from paceline.errors import PacelineError
from paceline.net import client
from paceline.net.completion import Completion, CompletionError
from paceline.net.servers import Drafting, Request, Senders, Server, _version, fingerprint, read_requests
from tests.served import Served
from tests.web import Handler, serving

LLAMA_CPP = """
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 90
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
llamacpp:spec_decode_num_drafts_total 40
llamacpp:spec_decode_num_draft_tokens_total 80
llamacpp:spec_decode_num_accepted_tokens_total 30
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 20
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 10
"""
SGLANG = """
sglang:num_running_reqs{model_name="m"} 3.0
sglang:generation_tokens_total{model_name="m"} 500.0
sglang:spec_accept_length{model_name="m"} 2.5
"""
TWO_ENGINES = """
vllm:spec_decode_num_drafts_total{engine="0"} 4
vllm:spec_decode_num_drafts_total{engine="1"} 6
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
vllm:spec_decode_num_accepted_tokens_total{engine="1"} 5
vllm:request_generation_tokens_sum{engine="0"} 77
"""


def test_metrics_of_every_server():
    found = Drafting.parse(LLAMA_CPP)
    assert ((found.engine, found.running, found.tokens), found.survival) == (("llamacpp", 2, 90), [0.5, 0.25])
    assert found.round_tokens == 1.75
    found = Drafting.parse(SGLANG)
    assert (found.engine, found.running, found.round_tokens, found.survival) == ("sglang", 3, 2.5, [])
    found = Drafting.parse(TWO_ENGINES)
    assert (found.drafts, found.accepted, found.tokens) == (10, 5, 0)
    assert Drafting.parse("up 1\n").round_tokens is None


def test_counts_between_two_readings():
    before = Drafting("vllm", 1, 100, 10, 30, 12, (8, 4))
    new = Drafting("vllm", 5, 160, 30, 90, 42, (24, 12, 6)).since(before)
    assert (new.running, new.tokens, new.drafts, new.drafted, new.accepted) == (5, 60, 20, 60, 30)
    assert new.survival == [0.8, 0.4, 0.3]


def test_counts_by_drafter():
    page = 'paceline:spec_decode_drafter_{}_tokens_total{{drafter="{}"}} {}\n'
    pages = "".join(page.format(what, name, n) for name, counts in (("sam", (9, 4)), ("model", (5, 5)))
                    for what, n in zip(("draft", "accepted"), counts, strict=True))  # fmt: skip
    now = Drafting.parse(pages)
    assert now.by_drafter == {"sam": [9, 4], "model": [5, 5]}
    assert now.since(Drafting(by_drafter={"sam": (3, 1)})).by_drafter == {"sam": [6, 3], "model": [5, 5]}


def test_a_server_is_found_with_its_engine_and_version():
    with Served() as fake:
        server = Server.find(fake.url.removesuffix("/v1"))
        assert server.facts == {"url": fake.url, "model": "fake", "engine": "vllm", "version": "0.32.0"}
        body = server.body(Request("1", [{"role": "user", "content": "hi"}]), 5, draft="none")
        assert (body["stream"], body["return_token_ids"], body["draft"]) == (True, True, "none")
    with pytest.raises(CompletionError, match="is the server up"):
        Server.find(fake.url)


SAID = ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")
TALK = [{"role": role, "content": text} for role, text in SAID]
LOG = [
    {"prompt_tokens": [1, 2], "tokens": [3, 4, 5], "time": 1000.5, "seconds": 0.5},
    {"messages": TALK, "timestamp": "1970-01-01T00:16:42+00:00"}, {"prompt": "what?", "created": 1003000000000},
]


def test_requests_of_a_log_have_their_prompts_and_times(tmp_path):
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, LOG)))
    one, two, three, four = read_requests(tmp_path / "log.jsonl")
    assert (one.prompt, one.length, one.at) == ([1, 2], 3, 1000.0)
    assert [len(two.messages), len(three.messages)] == [1, 3]
    assert (two.id, three.id, three.at) == ("2", "2.1", 1002.0)
    assert (four.messages[0]["content"], four.at) == ("what?", 1003000000.0)
    assert len(read_requests(tmp_path / "log.jsonl", limit=2)) == 2


def test_requests_carry_the_tools_that_could_be_called(tmp_path):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    (tmp_path / "log.jsonl").write_text(json.dumps({"messages": TALK, "tools": tools}))
    first, second = read_requests(tmp_path / "log.jsonl")
    assert first.tools == second.tools == tools
    server = Server("http://127.0.0.1:9/v1", "m")
    assert server.body(first, 5)["tools"] == tools
    assert "tools" not in server.body(replace(first, tools=()), 5)
    assert fingerprint([first]) != fingerprint([replace(first, tools=())])


def bodies(server, count):
    return [server.body(Request(str(n), [{"role": "user", "content": f"{n}"}]), 6) for n in range(count)]


def test_so_many_are_under_way_and_deliveries_are_timed():
    with Served(seconds=lambda running: 0.01, accepted=(1,), fails=lambda number: number == 3) as fake:
        server = Server.find(fake.url)
        answers = server.send(bodies(server, 7), 2)
        assert fake.most_running == 2
    failed = [one for one in answers if isinstance(one, CompletionError)]
    assert len(failed) == 1
    assert "500" in str(failed[0])
    done = next(one for one in answers if isinstance(one, Completion))
    assert done.tokens == [0, 1, 2, 3, 4, 0]
    assert len(done.times) == 4  # rounds of 1, 2, 2 and 1 tokens
    assert done.times[-1] - done.times[0] > 0.02


def test_waiting_for_a_place_counts_where_requests_have_their_times():
    with Served(seconds=lambda running: 0.01) as fake:
        server = Server.find(fake.url)
        answers = server.send(bodies(server, 3), 1, due=[0.0, 0.0, 0.4])
    first, second, third = (one.times[0] for one in answers if isinstance(one, Completion))
    assert second > first + 0.05  # it was due with the first one
    assert third < second


def test_answers_of_several_processes_have_the_order_of_their_requests():
    with Served() as fake, Senders(2) as senders:
        server = Server.find(fake.url)
        asked = [server.body(Request(str(n), [{"role": "user", "content": "hi"}]), n) for n in range(1, 6)]
        answers, _ = senders.send(server, asked, concurrency=2)
    assert [len(one.tokens) for one in answers if isinstance(one, Completion)] == [1, 2, 3, 4, 5]


def test_stopping_ends_it_at_once():
    with Served(seconds=lambda running: 0.2) as fake:
        server = Server.find(fake.url)
        looks = iter([False, False, True])
        answers = server.send(bodies(server, 4), 2, stopped=lambda: next(looks))
        assert (answers, len(fake.asked)) == ([None] * 4, 2)


class Hostile(Handler):
    """A server that answers every GET with `page`, without end where it is `endless`, and every POST with `events`."""

    protocol_version, wbufsize, page, endless, events = "HTTP/1.0", 0, b"", False, b""

    def do_GET(self):
        self.begin()
        with suppress(ConnectionError):
            self.wfile.write(self.page)
            while self.endless:
                self.wfile.write(b"# " + b"x" * (1 << 16) + b"\n")

    def do_POST(self):
        self.body()
        self.begin(Content_Type="text/event-stream")
        self.wfile.write(self.events)


def hostile(**what):
    return serving(type("Made", (Hostile,), what))


def test_a_metrics_page_cannot_fill_the_memory_or_the_terminal(monkeypatch):
    with hostile(endless=True) as url, pytest.raises(CompletionError, match="longer than 16 MiB"):
        Drafting.read(url)
    monkeypatch.setattr(client, "PAGE_BYTES", 1 << 40)
    monkeypatch.setattr(client, "PAGE_SECONDS", 0.1)
    with hostile(endless=True) as url, pytest.raises(CompletionError, match="or does not end"):
        Drafting.read(url)
    with hostile(page=b"vllm:x{ 1 2 3 {\n") as url, pytest.raises(CompletionError, match="not in Prometheus"):
        Drafting.read(url)
    found = Drafting.parse("vllm:num_requests_running NaN\nvllm:spec_decode_num_drafts_total +Inf\n")
    assert (found.engine, found.running, found.drafts) == ("", 0, 0)
    assert Drafting.parse("vllm:generation_tokens_total 5\n").since(Drafting(tokens=90)).tokens == 5  # started anew
    with hostile(page=json.dumps({"version": "1\x1b[2J\n" + "9" * 999}).encode()) as url:
        assert _version(url, None).startswith("1?[2J 999")
        assert len(_version(url, None)) == 80
    with hostile(page=b'{"a":' * 5000) as url:
        assert _version(url, None) == ""
    with pytest.raises(PacelineError, match="--api-key-env"):
        Server.find("http://user:secret@127.0.0.1:8000")


@pytest.mark.parametrize("part", [
    {"choices": [{"index": 1 << 40, "delta": {"content": "a"}}]},
    {"choices": [{"index": -3, "delta": {"content": "a"}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 1 << 40, "function": {"name": "a"}}]}}]},
    {"choices": [], "usage": {"completion_tokens": "Infinity"}},
    {"choices": [], "usage": {"completion_tokens": float("inf")}}, {"choices": [], "usage": [1]}, {"choices": 7},
    {"error": "\x1b[2J"},
])
def test_an_event_that_is_no_part_of_an_answer_fails_its_request_alone(part):
    with hostile(events=f"data: {json.dumps(part)}\n\ndata: [DONE]\n\n".encode()) as url:
        server = Server(url, "m")
        (answer,) = server.send(bodies(server, 1), 1)
        assert isinstance(answer, CompletionError)
        assert "\x1b" not in str(answer)


def test_calls_come_in_any_order():
    answer = Completion()
    for number, name in ((1, "second"), (0, "first")):
        call = {"index": number, "function": {"name": name, "arguments": "{}"}}
        answer.take({"choices": [{"delta": {"tool_calls": [call]}}]})
    assert answer.tool_calls == [{"name": name, "arguments": "{}"} for name in ("first", "second")]


def test_prompts_are_sent_as_the_model_reads_them(tmp_path):
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}}]
    lines = [
        json.dumps({"messages": [{"role": "user", "content": parts}]}),
        "INFO 01-01 Request cmpl-1 details: prompt: '<user> hi', ",
        "DEBUG 01-01 Generated response cmpl-1: output: 'ho', ", json.dumps({"prompt": "b", "time": float("nan")}),
        json.dumps({"prompt": "b", "time": 5, "seconds": "x"}),
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    image, rendered, never, five = read_requests(tmp_path / "log.jsonl")
    server = Server("http://127.0.0.1:9/v1", "m")
    assert server.body(image, 5)["messages"] == [{"role": "user", "content": "see"}]
    assert server.body(rendered, 5)["prompt"] == "<user> hi"
    assert "messages" not in server.body(rendered, 5)
    assert (never.at, five.at) == (None, 5)


def test_answers_tell_their_own_drafts_in_vllms_shape():
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram")
    one, other = (dict(zip(names, told, strict=True)) for told in ((3, 9, 4, [1, 0, 2]), (1, 2, 1, [0, 1])))
    answers = [Completion(speculation=told, usage={"completion_tokens": 10}) for told in (one, other)]
    told = Drafting.of_answers(answers)
    assert told is not None
    assert (told.drafts, told.drafted, told.accepted, told.by_position) == (4, 11, 5, [3, 2])
    assert [answer.rounds for answer in answers] == [6, 9]
    assert Drafting.of_answers([*answers, Completion()]) is None


COUNTS = {"num_draft_tokens": 9, "num_accepted_draft_tokens": 4}
OF_ALL = {"num_spec_steps": 3, **COUNTS, "acceptance_histogram": [1, 0, 2]}


@pytest.mark.parametrize(("said", "found"), [
    ({"metrics": {"speculative_decoding": OF_ALL | {"draft_acceptance_rate": 0.4, "num_rounds": "?", "by_drafter": {
        "sam": {"drafted": 9, "accepted": 4}, "x": {"drafted": "many", "accepted": 0}}}}},
     OF_ALL | {"by_drafter": {"sam": (9, 4)}}),
    ({"timings": {"predicted_n": 10, "draft_n": 9, "draft_n_accepted": 4}}, COUNTS),
    ({"timings": {"predicted_n": 10}, "metrics": {"speculative_decoding": None}}, {}),
    ({"choices": [{"meta_info": {"spec_verify_ct": 3, "spec_accept_token_num": 4, "spec_draft_token_num": 9,
                                 "spec_accept_histogram": [1, 0, 2], "id": "x"}}]}, OF_ALL),
    ({"choices": [{"meta_info": {"spec_verify_ct": 3, "spec_num_correct_drafts": 4, "spec_num_proposed_drafts": 9,
                                 "spec_correct_drafts_histogram": [1, 0, 2]}}]}, OF_ALL),
    ({"choices": [{"speculative_decoding": {"num_spec_steps": 3, "total_accepted_draft_tokens": 4,
                                            "total_draft_tokens": 9, "acceptance_histogram": [1, 0, 2]}}]}, OF_ALL),
    ({"timings": {"draft_n": "many", "draft_n_accepted": 4}}, {}),
])  # fmt: skip
def test_answers_of_every_server_tell_their_drafts(said, found):
    answer = Completion()
    answer.take({"choices": [], "usage": {"completion_tokens": 7}, **said})
    assert answer.speculation == found
    told = Drafting.of_answers([answer])
    if found:
        assert told is not None
        assert (told.drafts, told.drafted, told.accepted) == (3, 9, 4)  # llama.cpp: seven tokens but the four
        assert told.by_drafter == {name: [*counts] for name, counts in found.get("by_drafter", {}).items()}
    else:
        assert told is None
