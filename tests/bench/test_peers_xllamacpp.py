"""xllamacpp as a peer: its worker with a stand-in for the package, a web server that streams completions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.bench.peers import check, opened, peer

from paceline.errors import ModelError, PacelineError
from paceline.workbench.contestant import Ask, NotInstalled
from paceline.workbench.peers.xllamacpp import rounds

PACKAGE = '''
import http.server, json, threading, types
__version__ = "1.0"
common_speculative_type = types.SimpleNamespace(**{
    "COMMON_SPECULATIVE_TYPE_NGRAM_MOD": 9, "COMMON_SPECULATIVE_TYPE_NGRAM_CACHE": 8,
    "COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3": 3,
})
def get_system_info(): return "AVX2 = 1"
class CommonParams:
    def __init__(self):
        self.model = types.SimpleNamespace(path="")
        self.cpuparams, self.cpuparams_batch = (types.SimpleNamespace(n_threads=-1) for _ in "ab")
        draft = types.SimpleNamespace(mparams=types.SimpleNamespace(path=""), n_max=3, n_gpu_layers=-1)
        draft.cpuparams, draft.cpuparams_batch = (types.SimpleNamespace(n_threads=-1) for _ in "ab")
        cache = types.SimpleNamespace(lookup_cache_static="")
        self.speculative = types.SimpleNamespace(types=[0], draft=draft, ngram_cache=cache)
class Server:
    started = 0
    def __init__(self, params):
        print("noise")
        Server.started += 1
        speculative = params.speculative
        files = {3: speculative.draft.mparams.path, 8: speculative.ngram_cache.lookup_cache_static}
        kind = speculative.types[0]
        drafts = kind == 9 or bool(files.get(kind)) and open(files[kind]).read() == "drafter"
        size = speculative.draft.n_max if kind == 3 else 5
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()
                def say(event): self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
                if asked["prompt"] == [666]: return say({"error": {"message": "bad luck"}})
                drafted = accepted = 0
                for i in range(asked["n_predict"]):
                    if drafts and i in (1, 4):
                        drafted, accepted = drafted + size, accepted + 2
                    counts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
                    say({"content": "x", "tokens": [asked["prompt"][-1] + i], "stop": False, "timings": counts})
                say({"content": "", "tokens": [], "stop": True, "seed": asked["seed"], "started": Server.started})
            def log_message(self, *_): pass
        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{web.server_port}"
'''


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter with the stand-in."""
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    (tmp_path / "packages" / "xllamacpp").mkdir(parents=True)
    (tmp_path / "packages" / "xllamacpp" / "__init__.py").write_text(PACKAGE)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "packages"} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return f"vllm=nowhere,xllamacpp={script}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return tmp_path / "model.gguf"


def test_the_server_answers(python: str, file: Path) -> None:
    with opened(f"xllamacpp:{file}", file.parent, python=python, threads=3) as one:
        one.wake(0.01)
        one.forget()
        (turn,) = one.answer([[4, 6]], Ask(max_tokens=5))
        assert (turn.tokens, turn.lengths, turn.nodes) == ([6, 7, 8, 9, 10], [1] * 5, [0] * 5)
        check(turn)
        (turn,) = one.answer([[4, 6]], Ask(max_tokens=5, ends=(8,), temperature=0.7, seeds=(5,)))
        assert (turn.tokens, turn.finish) == ([6, 7, 8], "stop")
        assert (one.settings["threads"], one.settings["system"], one.target_bytes) == (3, "AVX2 = 1", 4)
        with pytest.raises(PacelineError, match="bad luck"):
            one.answer([[666]], Ask(max_tokens=5))
        with pytest.raises(PacelineError, match="answers 1 at a time, not 2"):
            one.answer([[4], [5]], Ask(max_tokens=5))
    with opened(f"xllamacpp:{file},spec=ngram-mod", file.parent, python=python) as one:
        one.forget()
        (turn,) = one.answer([[4, 6]], Ask(max_tokens=9))
        assert (turn.lengths, turn.nodes) == ([1, 3, 3, 1, 1], [0, 5, 5, 0, 0])
        check(turn)


def test_the_server_drafts_with_a_file(python: str, file: Path, tmp_path: Path) -> None:
    (tmp_path / "drafter").write_text("drafter")
    for options, size in {"spec=draft-eagle3,k=7": 7, "spec=draft-eagle3": 3, "spec=ngram-cache": 5}.items():
        with opened(f"xllamacpp:{file},{options},file={tmp_path / 'drafter'}", file.parent, python=python) as one:
            (turn,) = one.answer([[4, 6]], Ask(max_tokens=9))
            assert turn.nodes == [0, size, size, 0, 0]
    refused = {"spec=draft-eagle3": "draft-eagle3 needs file=", "file=none.gguf": "there is no file"}
    for options, words in refused.items():
        with pytest.raises(PacelineError, match=words):
            peer(f"xllamacpp:{file},{options}", file.parent, python=python).open()


def test_a_server_that_is_not_there(file: Path, tmp_path: Path) -> None:
    for python in (None, "vllm=/somewhere/python"):
        with pytest.raises(NotInstalled, match="xllamacpp wants an environment of its own: python -m venv ENV"):
            peer(f"xllamacpp:{file}", tmp_path, python=python).open()
    with pytest.raises(ModelError, match="there is no file"):
        peer("xllamacpp:none.gguf", tmp_path, python=sys.executable).open()
    one = peer(f"xllamacpp:{file}", tmp_path, python=sys.executable)
    with pytest.raises(NotInstalled, match=r"cannot run it \(ModuleNotFoundError"):
        one.open()
    one.close()


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([(0.1, 1, 0, 0), (0.2, 1, 0, 0)], ([0.1, 0.2], [1, 1], [0, 0])),
        # A draft of 22, of which one stood, then a round without a draft, then a draft of which none did.
        ([(0.1, 1, 0, 0), (0.2, 1, 22, 1), (0.3, 1, 22, 1), (0.4, 1, 22, 1), (0.5, 1, 30, 1)],
         ([0.1, 0.3, 0.4, 0.5], [1, 2, 1, 1], [0, 22, 0, 8])),
        # Several tokens in an event, and an answer that ends inside a draft.
        ([(0.1, 1, 0, 0), (0.2, 2, 6, 4)], ([0.1, 0.2], [1, 2], [0, 6])),
        ([], ([], [], [])),
    ],
)  # fmt: skip
def test_rounds_are_told_by_the_counts_of_drafts(events: list, expected: tuple) -> None:
    assert rounds(events) == expected
