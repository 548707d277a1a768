"""Fill in the middle: text between a prefix and a suffix, for models whose tokenizer has marks for it.

`suffix` of OpenAI's text completions, and /infill as llama.cpp's editors send it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import Field

from paceline.formats.tokenizer import Tokenizer
from paceline.serve.fields import Seed, Strict, TextRequest
from paceline.serve.settings import Refused

MARKS = {
    "prefix": ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<PRE>", "<｜fim▁begin｜>", "<|code_prefix|>"),
    "suffix": ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<SUF>", "<｜fim▁hole｜>", "<|code_suffix|>"),
    "middle": ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<MID>", "<｜fim▁end｜>", "<|code_middle|>"),
    "repo": ("<|repo_name|>", "<repo_name>", "<reponame>", "<fim_repo>"),
    "file": ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<fim_sep>"),
    "pad": ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<EOT>"),
}
"""How tokenizers spell the marks."""


class Context(NamedTuple):
    """The text around the gap, and (name, text) of other files to put in front."""

    prefix: str
    suffix: str
    files: Sequence[tuple[str, str]] = ()


def marks_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of a tokenizer's marks, by use. Raises Refused if it cannot fill in the middle."""
    known = {token.content: i for i, token in tokenizer.inner.added_tokens_decoder.items()}
    found = {use: known[name] for use, names in MARKS.items() for name in names[::-1] if name in known}
    if missing := [use for use in ("prefix", "suffix", "middle") if use not in found]:
        what = f"{tokenizer.name} cannot fill in the middle: its tokenizer has no mark for a {missing[0]}"
        raise Refused(f"{what}; leave the suffix out, or serve a model that was trained with one", "suffix")
    return found


def prompt_of(tokenizer: Tokenizer, context: Context, max_context: int, *, begins: bool = True) -> list[int]:
    """Token ids that ask for the text between prefix and suffix; marks in either are text.

    begins  whether BOS comes first, for tokenizers that have it so."""
    marks, made = marks_of(tokenizer), list[int]()
    for text in (context.prefix, context.suffix, *(text for _, text in context.files)):
        tokenizer.refuse_long(text, max_context)
    if "file" in marks:
        for name, text in context.files:
            made += [marks["file"], *tokenizer.encode_words(f"{name}\n{text}")]
        made += [marks["file"]] if made else []
    else:
        made += [i for name, text in context.files for i in tokenizer.encode_words(f"{name}\n{text}\n\n")]
    begin = tokenizer.encode("")[:1] if begins else []
    begin = begin if begin == [getattr(tokenizer.inner, "bos_token_id", None)] else []
    before, after = tokenizer.encode_words(context.prefix), tokenizer.encode_words(context.suffix)
    return [*begin, *made, marks["prefix"], *before, marks["suffix"], *after, marks["middle"]]


def filling(tokenizer: Tokenizer, request: TextRequest, max_context: int) -> TextRequest:
    """Turn a request with a suffix into one with token ids.
    Its answers end where another part of a file would begin."""
    if not request.suffix:
        return request
    given: Any = request.prompt
    texts = [given] if isinstance(given, str) else given
    if request.echo or not all(isinstance(text, str) for text in texts):
        what = "suffix does not go with echo" if request.echo else "suffix is for a prompt that is text"
        raise Refused(f"{what}; leave it out", "suffix")
    begins = request.add_special_tokens
    prompts = [prompt_of(tokenizer, Context(text, request.suffix), max_context, begins=begins) for text in texts]
    return request.model_copy(update={"prompt": prompts, "stop_token_ids": _ends(tokenizer, request.stop_token_ids)})


def _ends(tokenizer: Tokenizer, given: Sequence[int] | None = None) -> list[int]:
    return [*(given or ()), *marks_of(tokenizer).values()]


class Extra(Strict):
    """A piece of another file."""

    text: str
    filename: str = "tmp"
    time: float | None = None


class InfillRequest(Strict):
    """llama.cpp's /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[Extra] = Field([], max_length=256)
    prompt: str = ""
    n_predict: int = Field(-1, ge=-1)
    model: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: Seed = None
    stop: str | list[str] | None = None
    response_fields: list[str] | None = None
    # Editors send these; they change no answer, or only how long it may take.
    stream: bool = False
    cache_prompt: bool | None = None
    id_slot: int | None = None
    n_indent: int | None = None
    samplers: list[str] | None = None
    t_max_prompt_ms: float | None = None
    t_max_predict_ms: float | None = None
    timings_per_token: bool | None = None

    def text(self, tokenizer: Tokenizer, max_context: int) -> TextRequest:
        """The request as a text completion. Raises Refused if it streams."""
        if self.stream:
            raise Refused("/infill does not stream; leave stream out, or use suffix of /v1/completions", "stream")
        files = [(one.filename, one.text) for one in self.input_extra]
        context = Context(self.input_prefix + self.prompt, self.input_suffix, files)
        names = ("model", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
        given = {name: getattr(self, name) for name in names} | {"repetition_penalty": self.repeat_penalty}
        return TextRequest(
            prompt=prompt_of(tokenizer, context, max_context), stop_token_ids=_ends(tokenizer),
            max_tokens=max_context if self.n_predict < 0 else max(self.n_predict, 1), **given,
        )  # fmt: skip

    def answer(self, done: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Turn a text completion's answer into llama.cpp's."""
        (choice,), usage = done["choices"], done["usage"]
        count, is_cut = usage["completion_tokens"], choice["finish_reason"] == "length"
        text = choice["text"] if self.n_predict else ""  # 0 asks only to read the prompt.
        made = {
            "content": text, "stop": True, "model": done["model"], "stop_type": "limit" if is_cut else "eos",
            "tokens_predicted": count, "tokens_evaluated": usage["prompt_tokens"], "truncated": False,
            "timings": {
                "prompt_n": usage["prompt_tokens"], "predicted_n": count, "predicted_ms": 1000 * seconds,
                "predicted_per_second": count / max(seconds, 1e-6),
            },
        }  # fmt: skip
        return made if not self.response_fields else _chosen(made, self.response_fields)


def _chosen(answer: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The fields with these names; "a/b" is b in a."""
    chosen = {}
    for name in names:
        outer, _, inner = name.partition("/")
        value = answer.get(outer)
        value = value.get(inner) if inner and isinstance(value, dict) else value
        if value is not None:
            chosen[name] = value
    return chosen
