"""Tokenizers as files hold them: a model's folder, a GGUF file, a SentencePiece file. Needs no torch and no
transformers for a folder with a tokenizer.json."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ModelError, install
from paceline.formats.place import SMALL_FILES, find, gguf_of, is_gguf, name_of, one_line
from paceline.formats.plain_tokenizer import PlainTokenizer, vocab_size_in
from paceline.formats.tokenizer import SentencePiece, Tokenizer, vocabulary

if TYPE_CHECKING:
    from paceline.formats.gguf_file import GGUF

TOKENIZER_FILES = ["tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json"]


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a model's folder has a tokenizer. Names on the hub are taken to have one."""
    path = Path(folder).expanduser()
    return not path.is_dir() or any((path / file).exists() for file in TOKENIZER_FILES)


def load_tokenizer(model: str | Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a model (named as in `load`), of a folder with only a tokenizer, or of a SentencePiece
    file.

    A GGUF file has the tokenizer in the same folder, if it has the file's tokens, else its own, which is rebuilt. An
    adapter without a tokenizer has its base's. A SentencePiece file (tokenizer.model) needs the package sentencepiece.

    Raises ModelError if there is no tokenizer, or if it has token ids that the model lacks."""
    if is_gguf(model):
        return tokenizer_of(_gguf(model), trust_remote_code)
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".model":
        return Tokenizer(_sentencepiece(path), str(model))
    folder = find(model, SMALL_FILES)
    if not has_tokenizer(folder):
        from paceline.formats.adapter import Adapter  # It needs torch.

        if adapter := Adapter.of(folder):
            return load_tokenizer(adapter.base, trust_remote_code=trust_remote_code)
    return tokenizer_in(folder, name_of(model), trust_remote_code)


def _gguf(model: str | Path) -> GGUF:
    """The GGUF file `model`. ModelError if there is none, or no engine, which reads it."""
    if find_spec("paceline.formats.gguf_file") is None:
        instead = "name a folder with the model's tokenizer.json, or its name on the hub"
        raise ModelError(f"only the engine reads the tokenizer in a GGUF file, {model}: {instead}; or {install('.')}")
    from paceline.formats.gguf_file import GGUF

    return GGUF(gguf_of(model))


def tokenizer_of(file: GGUF, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a GGUF file. ModelError as in `load_tokenizer`."""
    from paceline.formats import gguf_tokenizer as own

    folder, name = file.path.parent, file.path.stem
    if has_tokenizer(folder):
        tokenizer = tokenizer_in(folder, name, trust_remote_code)
        if own.same_tokens(tokenizer, file, all_of_them=True):
            return own.as_in(file, tokenizer)
    return own.tokenizer_of(file, name)


def tokenizer_for(model: str | Path, tokenizer: str | Path) -> Tokenizer:
    """Load `tokenizer` for use with `model`. ModelError if `model` is a GGUF file with other tokens."""
    named = load_tokenizer(tokenizer)
    if is_gguf(model):
        file = _gguf(model)
        from paceline.formats.gguf_tokenizer import as_in, same_tokens

        if not same_tokens(named, file, all_of_them=False):
            raise ModelError(f"the tokenizer {tokenizer} has other tokens than {model}: it is another model's")
        return as_in(file, named)
    return named


def tokenizer_in(folder: Path, name: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer in a folder, read by transformers where it is installed, else by tokenizers alone.
    ModelError as in `load_tokenizer`."""
    there = [file for file in ("config.json", "tokenizer_config.json", *TOKENIZER_FILES) if (folder / file).exists()]
    if there == ["tokenizer.model"]:  # transformers makes no tokenizer of only this file.
        return Tokenizer(_sentencepiece(folder / "tokenizer.model"), name)
    if not set(there) & set(TOKENIZER_FILES):
        raise ModelError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    alone = not all(map(find_spec, ("torch", "transformers")))
    try:
        inner = PlainTokenizer(folder) if alone else _by_transformers(folder, trust_remote_code)
    except Exception as error:  # Third-party parsers of many formats may raise anything.
        raise ModelError(f"the tokenizer in {folder} cannot be read: {one_line(error)}") from None
    if "config.json" in there:
        known = vocab_size_in(folder) if alone else _known(folder, trust_remote_code)
        highest = max(vocabulary(inner).values(), default=0)
        if known is not None and highest >= known:
            raise ModelError(
                f"the tokenizer in {folder} has token ids up to {highest} but the model knows only 0 to {known - 1}: "
                "they are of different models, or the embeddings were not resized when tokens were added"
            )
    return Tokenizer(inner, name)


def _by_transformers(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer  # imported here, because it takes a third of a second

    inner = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    inner.model_max_length = sys.maxsize  # The engine checks the context; transformers would warn.
    return inner


def _known(folder: Path, trust_remote_code: bool) -> int | None:
    """How many tokens the model in `folder` knows."""
    from paceline.formats.folder import read_config  # It needs torch.

    return getattr(read_config(folder, trust_remote_code).get_text_config(), "vocab_size", None)


def _sentencepiece(file: Path) -> SentencePiece:
    try:
        import sentencepiece
    except ImportError:
        raise ModelError(
            f"{file} is a SentencePiece file, and the package that reads it is not installed: "
            "pip install sentencepiece, or name a folder with a tokenizer.json"
        ) from None
    try:
        return SentencePiece(sentencepiece.SentencePieceProcessor(model_file=str(file)))
    except (RuntimeError, OSError) as error:
        raise ModelError(f"{file} cannot be read as a SentencePiece model: {one_line(error)}") from None
