"""Fill in the middle, by a text completion's suffix and by llama.cpp's /infill, and what editors ask beside it."""

import httpx2 as httpx
import pytest
from transformers import AutoTokenizer

from tests import models, native
from tests.serve.live import engine, serving

NAMES = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>"]


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    made = models.make("qwen3", tmp_path_factory.mktemp("m") / "tiny", max_position_embeddings=1024, **native.TINY)
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.add_tokens(NAMES)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def http(coder):
    with serving(engine(coder)) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def ids(coder):
    """Token ids of texts and marks, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(coder)

    def of(*parts):
        return [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]

    return of


def asked(http, route, **body):
    done = http.post(route, json=body)
    return done.status_code, done.json()


def test_a_suffix_makes_the_prompt_of_the_middle(http, ids):
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    status, whole = asked(http, "/v1/completions", prompt="the cat", suffix=" sat", **body)
    assert status == 200, whole
    prefix, suffix, middle = NAMES[:3]
    assert whole["prompt_token_ids"] == ids("<s>", prefix, "the cat", suffix, " sat", middle)
    plain = asked(http, "/v1/completions", prompt=whole["prompt_token_ids"], stop_token_ids=ids(*NAMES), **body)[1]
    assert plain["choices"][0]["text"] == whole["choices"][0]["text"]
    unbegun = asked(http, "/v1/completions", prompt="the cat", suffix=" sat", add_special_tokens=False, **body)[1]
    assert unbegun["prompt_token_ids"] == whole["prompt_token_ids"][1:]
    for nothing in ("", None):
        same = asked(http, "/v1/completions", prompt="the cat", suffix=nothing, **body)[1]
        assert same["prompt_token_ids"] == ids("<s>", "the cat")


@pytest.mark.parametrize("mark", NAMES)
def test_marks_in_the_text_are_text_and_marks_end_the_answer(http, ids, mark):
    number = ids(mark)[0]
    body = {"max_tokens": 4, "return_token_ids": True, "logit_bias": {str(number): 100}, "temperature": 0}
    status, whole = asked(http, "/v1/completions", prompt=f"a{mark}b", suffix=f"{mark}c", **body)
    assert status == 200
    assert whole["prompt_token_ids"].count(number) == (mark in NAMES[:3])
    assert (whole["choices"][0]["finish_reason"], whole["choices"][0]["text"]) == ("stop", "")
    assert whole["choices"][0]["token_ids"] == [number]
    assert asked(http, "/infill", input_prefix="a", temperature=0)[0] == 200


def test_an_editor_of_llama_cpp_is_answered(http, ids):
    asks = {
        "id_slot": 0, "input_prefix": "the cat\n", "input_suffix": "\nand", "prompt": "the ", "n_predict": 6,
        "input_extra": [{"text": "dog", "time": 1.5, "filename": "a.py"}], "n_indent": 0, "top_k": 40, "top_p": 0.9,
        "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000, "stop": "", "temperature": 0,
    }  # fmt: skip
    status, whole = asked(http, "/infill", **asks)
    assert status == 200, whole
    prefix, suffix, middle, file = NAMES[:4]
    prompt = ids("<s>", file, "a.py\ndog", file, prefix, "the cat\nthe ", suffix, "\nand", middle)
    plain = {"prompt": prompt, "stop_token_ids": ids(*NAMES), "max_tokens": 6, "temperature": 0}
    expected = asked(http, "/v1/completions", **plain)[1]
    assert whole["content"] == expected["choices"][0]["text"]
    assert (whole["tokens_evaluated"], whole["tokens_predicted"]) == (len(prompt), 6)
    assert (whole["stop"], whole["stop_type"]) == (True, "limit")
    fields = ["content", "timings/prompt_n", "unknown"]
    assert asked(http, "/infill", **asks, response_fields=fields)[1] == {
        "content": whole["content"], "timings/prompt_n": len(prompt),
    }  # fmt: skip
    warm = asked(http, "/infill", **{**asks, "n_predict": 0, "samplers": []})[1]
    assert warm["content"] == ""


@pytest.mark.parametrize(("route", "body", "why"), [
    ("/v1/completions", {"prompt": [1, 2], "suffix": "a"}, "suffix is for a prompt that is text"),
    ("/v1/completions", {"prompt": "a", "suffix": "a", "echo": True}, "suffix does not go with echo"),
    ("/v1/completions", {"prompt": "a " * 2000, "suffix": "a"}, "too long"),
    ("/infill", {"input_prefix": "a " * 2000}, "too long"), ("/infill", {"stream": True}, "/infill does not stream"),
    ("/infill", {"input_prefix": "a", "model": "other"}, "model is 'other'"),
    ("/infill", {"input_prefix": "a", "wish": 1}, "wish"),
])
def test_what_cannot_be_filled_in_is_refused(http, route, body, why):
    status, whole = asked(http, route, **body)
    assert status in (400, 404)
    assert why in whole["error"]["message"]


def test_a_model_without_marks_says_so(folder):
    with serving(engine(folder)) as address, httpx.Client(base_url=address) as client:
        for route, body in (("/v1/completions", {"prompt": "a", "suffix": "b"}), ("/infill", {"input_prefix": "a"})):
            status, whole = asked(client, route, **body)
            assert status == 400
            assert "tiny cannot fill in the middle: its tokenizer has no mark for a prefix" in whole["error"]["message"]


def test_stops_as_editors_send_them(http):
    body = {"prompt": "the cat", "max_tokens": 3, "temperature": 0}
    expected = asked(http, "/v1/completions", **body)[1]["choices"]
    for stop in ("", [f"never {i}" for i in range(32)]):
        assert asked(http, "/v1/completions", stop=stop, **body)[1]["choices"][0]["text"] == expected[0]["text"]
    status, whole = asked(http, "/v1/completions", stop=["a"] * 33, **body)
    assert (status, "at most 32 stop strings" in whole["error"]["message"]) == (400, True)


@pytest.mark.parametrize("route", ["/chat/completions", "/completions", "/responses", "/models", "/messages"])
def test_a_route_without_v1_says_so(http, route):
    done = http.get(route) if route == "/models" else http.post(route, json={})
    assert done.status_code == 404
    known = route != "/messages" or "/v1/messages" in http.get("/openapi.json").json()["paths"]
    assert (f"the route is /v1{route}; let the client's base URL end with /v1" in done.text) == known
    assert "/v1" not in http.post("/nothing", json={}).json()["error"]["message"]
