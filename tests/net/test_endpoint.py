"""Endpoints: servers, started servers and engines of this process answer alike."""

import subprocess
import sys

import pytest

from paceline.draft.registry import by_request
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.net.client import Retry
from paceline.net.completion import CompletionError
from paceline.net.endpoint import OutOfTime, Remote, Started
from paceline.serve.local import Local

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12}
SCORED = CHAT | {"temperature": 0.0, "logprobs": True, "top_logprobs": 3, "return_token_ids": True}


@pytest.fixture(scope="module")
def local():
    engine = Engine("models/demo", by_request(("suffix", "none")), max_batch=4)
    with Local(engine, drafts=("suffix", "none")) as endpoint:
        yield endpoint


def test_an_engine_answers_as_generate_does(local):
    prompts = [CHAT["messages"][0]["content"], "Count to ten."]
    bodies = [SCORED | {"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    tokenizer = local.engine.tokenizer
    ids = [tokenizer.encode_chat(body["messages"]) for body in bodies]
    answers = local.ask(bodies)
    own = Engine(local.engine.target, tokenizer=tokenizer)
    from paceline.core.sampling import SamplingParams

    for answer, right in zip(answers, own.generate(ids, SamplingParams(max_tokens=12)), strict=True):
        assert (answer.tokens, answer.text) == (right.tokens, right.text)
        assert answer.usage["completion_tokens"] == len(right.tokens) == len(answer.logprobs)
        assert len(answer.logprobs[0]["top_logprobs"]) == 3


def test_token_ids_are_a_prompt_and_a_request_chooses_its_drafter(local):
    tokenizer = local.engine.tokenizer
    body = {"prompt": tokenizer.encode_chat(CHAT["messages"]), "max_tokens": 12, "temperature": 0.0}
    plain, drafted, chat = local.ask([body | {"draft": "none"}, body, CHAT | {"temperature": 0.0}])
    assert plain.text == drafted.text == chat.text


def test_a_request_that_cannot_be_answered_is_an_error_and_the_others_are_not_harmed(local):
    with pytest.raises(CompletionError, match="temperature"):
        local.ask([CHAT, CHAT | {"temperature": -1.0}])
    with pytest.raises(CompletionError, match="draft"):
        local.ask([CHAT | {"draft": "what"}])
    assert local.ask([CHAT])[0].text


def test_requests_are_given_up_when_time_is_up(local):
    local.over = lambda: True
    try:
        with pytest.raises(OutOfTime):
            local.ask([CHAT | {"max_tokens": 1500, "ignore_eos": True}] * 8)
    finally:
        local.over = lambda: False
    assert local.ask([CHAT])[0].text


@pytest.mark.parametrize("spec", ["", "#model", "http://name:secret@host/v1"])
def test_what_is_no_address_is_refused(spec):
    with pytest.raises(PacelineError):
        Remote(spec)


SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "me"}]})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        choice = {"index": 0, "text": str(asked["prompt"]), "finish_reason": "stop"}
        self.reply({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    def reply(self, body):
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)
print("loading the model", flush=True)
if "--broken" in sys.argv:
    sys.exit("no such model")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("port", ["", " --port {port}"])
def test_a_server_is_started_asked_and_ended(tmp_path, port):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    with Started(f"{sys.executable} {script}{port}", wait=30, slots=2) as server:
        assert [one.text for one in server.ask([{"prompt": str(n)} for n in range(5)])] == list("01234")
        assert (server.model, server.owner) == ("m", "me")
    with Remote(server.url, retry=Retry(tries=1)) as gone, pytest.raises(CompletionError):
        gone.ask([{"prompt": "a", "model": "m"}])


def test_a_server_that_ends_at_once_says_why(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    with pytest.raises(PacelineError, match=r"ended with status 1.*no such model"), Started(
        f"{sys.executable} {script} --broken", wait=30
    ):
        raise AssertionError("it has not started")
    with pytest.raises(PacelineError, match="cannot be started"), Started("no-such-program"):
        raise AssertionError("it has not started")


WITHOUT_HTTP = """
import sys
for name in ("fastapi", "starlette", "uvicorn", "prometheus_client"):
    sys.modules[name] = None
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    "certify models/demo --draft sam --budget 5s --requests 0 --out",
    "eval align --model models/demo --judge checks --method vanilla --limit 1 --max-tokens 4 --out",
])
def test_our_engine_is_certified_and_evaluated_without_http(tmp_path, command):
    """The whole commands, where FastAPI is not installed."""
    script = f"{WITHOUT_HTTP}\nfrom paceline.cli import main\nsys.exit(main(sys.argv[1:]))"
    asked = [sys.executable, "-c", script, *command.split(), str(tmp_path / "out")]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr[-2000:]  # so short a budget may not suffice for a verdict
    assert (tmp_path / "out").is_dir()


def test_an_engine_of_this_process_needs_no_http():
    """It is asked where FastAPI and what counts for Prometheus are not installed."""
    script = WITHOUT_HTTP + """
from paceline.engine.engine import Engine
from paceline.serve.local import Local
with Local(Engine("models/demo")) as local:
    print(local.ask([{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "logprobs": True}])[0].usage)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "'completion_tokens': 2" in done.stdout, done.stderr[-2000:]
