"""A model's tokenizer by the package tokenizers alone, with what `Tokenizer` needs of one of transformers'.

It is read where torch or transformers is not installed: to replay a log needs neither."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from paceline.errors import ModelError, install
from paceline.jsonl import loads

NEEDED = "tokenizer.json"


class PlainTokenizer:
    """The tokenizer in a folder. ModelError if there is no tokenizer.json.

    chat_template  text of the template; templates by name if there are several; None without one."""

    def __init__(self, folder: Path):
        if not (folder / NEEDED).exists():
            raise ModelError(f"without transformers only a {NEEDED} is read; {install('.')}")
        self.backend_tokenizer = Backend.from_file(str(folder / NEEDED))
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        config = _read(folder / "special_tokens_map.json") | _read(folder / "tokenizer_config.json")
        named = {key: value for key, value in config.items() if key.endswith("_token")}
        texts = {key: one["content"] if isinstance(one, Mapping) else one for key, one in named.items()}
        self.special = {key: text for key, text in texts.items() if isinstance(text, str)}
        self.eos_token, self.bos_token = self.special.get("eos_token"), self.special.get("bos_token")
        self.eos_token_id, self.bos_token_id = self._id(self.eos_token), self._id(self.bos_token)
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()
        self.chat_template = _templates(folder, config.get("chat_template"))

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool, tools: Any = None,
        return_dict: bool = False, **inputs: Any,
    ) -> Any:  # fmt: skip
        """Token ids of a conversation, or its text."""
        source = self.chat_template or ""
        if not isinstance(source, str):
            source = source["tool_use" if tools and "tool_use" in source else "default"]
        given: dict[str, Any] = {"documents": None} | self.special | inputs
        text = compiled(source).render(messages=conversation, tools=tools, **given)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _read(file: Path) -> dict[str, Any]:
    given = loads(file.read_bytes()) if file.exists() else {}
    return given if isinstance(given, dict) else {}


def vocab_size_in(folder: Path) -> int | None:
    """How many tokens the model knows by its config.json; None if that does not say."""
    config = _read(folder / "config.json")
    text = config.get("text_config", config)
    size = text.get("vocab_size") if isinstance(text, Mapping) else None
    return size if isinstance(size, int) else None


def _templates(folder: Path, given: Any) -> str | dict[str, str] | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    return {one["name"]: one["template"] for one in given} if isinstance(given, list) else given


class Generation(Extension):
    """The tag in which templates put what the assistant writes, {% generation %}: nothing of it is marked here."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def compiled(source: str) -> jinja2.Template:
    """A chat template, in a sandbox, with the filters and functions that transformers gives templates.
    Raises jinja2.TemplateSyntaxError for a broken template."""
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    sandbox.filters["tojson"] = _as_json
    return sandbox.from_string(source)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _as_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)
