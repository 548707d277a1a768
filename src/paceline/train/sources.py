"""Text sources: files on the user's disk, read into documents (plain text) or conversations (chat messages).

A source is given as `NAME=PATH`, or just a path (the name is then the file's stem). Files are .txt and .jsonl,
gzip-compressed or not. `NAME=hf:OWNER/DATA`, `hf:OWNER/DATA:CONFIG@SPLIT` in full, is a data set of the Hugging Face
hub. A JSON record is recognised by its fields, so common data sets work unchanged:
{text}, {title, text}, {instruction, context, response}, {question, answer}, {turns: [{role, text}]},
{messages: [{role, content}]}. Held-out documents are chosen by a hash of their content, so the split is the same on
every machine and in every order.

Doesn't know: tokenizers, models, where data comes from or whether its licence lets you use it.

    python -m zoo sources gsm=train.jsonl.gz books=alice.txt
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, install
from paceline.jsonl import objects, opened

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}

KNOWN_RECORDS = (
    "{text}, {title, text}, {instruction, context, response}, {question, answer}, "
    "{turns: [{role, text}]}, {messages: [{role, content}]}"
)
ROLES = ("system", "user", "assistant")
HUB = "hf:"
TEXT_CHUNK = 8000  # characters of a plain-text file that make one document, cut at a paragraph


class SourceError(PacelineError):
    """A source cannot be read; the message names file and line."""


@dataclass(frozen=True)
class Source:
    """One file, or one data set of the hub as `hf:OWNER/DATA:CONFIG@SPLIT`, and the name it goes by in reports."""

    name: str
    path: Path | str


@dataclass(frozen=True)
class Document:
    """One document: `messages` for anything that is a conversation, `text` for anything that is not.

    `context` is the passage that an answer was written from, where the record had one.
    """

    source: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    context: str = ""
    fields: dict[str, str] = field(default_factory=dict)

    def plain(self) -> str:
        """The document as plain text: conversations are written out one turn a paragraph."""
        return self.text or "\n\n".join(m["content"] for m in self.messages)


def parse_source(spec: str) -> Source:
    """`NAME=PATH` or `PATH` -> Source."""
    name, equals, path = spec.partition("=")
    if not equals:
        name, path = re.sub(r"\.(txt|jsonl)(\.gz)?$", "", Path(spec).name), spec
    if not name or not path:
        raise SourceError(f"{spec!r} is not a source: write NAME=PATH, for example books=alice.txt.gz")
    if path.startswith(HUB):
        if not re.fullmatch(r"hf:[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w.-]+)?", path):
            raise SourceError(f"source {name!r}: {path} is not hf:OWNER/DATA, hf:OWNER/DATA:CONFIG or ...@SPLIT")
        return Source(re.split("[/:@]", path)[2] if not equals else name, path)
    file = Path(path).expanduser()
    if not file.is_file():
        raise SourceError(f"source {name!r}: no such file: {file}")
    if not re.search(r"\.(txt|jsonl)(\.gz)?$", file.name):
        raise SourceError(f"source {name!r}: {file.name} is not .txt, .txt.gz, .jsonl or .jsonl.gz")
    return Source(name, file)


def parse_sources(specs: Iterable[str]) -> list[Source]:
    """Several specs; the same name may stand for several files."""
    return [parse_source(spec) for spec in specs]


def read(source: Source) -> Iterator[Document]:
    """All documents of one source, in file order."""
    if isinstance(source.path, str):
        for number, row in enumerate(_hub_rows(source), start=1):
            yield _document(source, f"{source.path}, row {number}", row)
    elif source.path.name.removesuffix(".gz").endswith(".jsonl"):
        for where, row in objects(source.path, SourceError, KNOWN_RECORDS):
            yield _document(source, where, row)
    else:
        yield from _plain_text(source)


def held_out(document: Document, share: float = 0.01) -> bool:
    """Whether the document belongs to the validation split: a function of its content alone."""
    digest = hashlib.sha256(document.plain().encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share


def split(documents: Iterable[Document], share: float = 0.01) -> tuple[list[Document], list[Document]]:
    """(training documents, held-out documents)."""
    train: list[Document] = []
    valid: list[Document] = []
    for document in documents:
        (valid if held_out(document, share) else train).append(document)
    return train, valid


def _text_of(path: Path) -> str:
    with opened(path, SourceError) as stream:
        content = stream.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SourceError(f"{path}, line {line}: not UTF-8 ({error.reason})") from None


def _hub_rows(source: Source) -> Iterable[Any]:
    """Rows of a data set on the hub, or of its copy on this disk."""
    try:
        import datasets
    except ImportError:
        raise SourceError(
            f"source {source.name!r}: {source.path} needs the package datasets; {install('train')}"
        ) from None
    name, _, split = str(source.path).removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    try:
        return datasets.load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError, RuntimeError) as error:  # unreachable, unknown, a wrong configuration or split
        why = " ".join(str(error).split())[:200]
        raise SourceError(
            f"source {source.name!r}: {source.path} cannot be loaded from the hub ({why}); "
            f"give a file instead: {source.name}=PATH"
        ) from None


def _plain_text(source: Source) -> Iterator[Document]:
    """Paragraph-aligned chunks, so that a whole book is not one held-out decision."""
    assert isinstance(source.path, Path)
    paragraphs: list[str] = []
    size = 0
    for block in re.split(r"\n\s*\n", _text_of(source.path).replace("\r\n", "\n")):
        if block.strip():
            paragraphs.append(block.strip("\n"))
            size += len(block)
        if size > TEXT_CHUNK:
            yield Document(source.name, text="\n\n".join(paragraphs))
            paragraphs, size = [], 0
    if paragraphs:
        yield Document(source.name, text="\n\n".join(paragraphs))


def _document(source: Source, where: str, row: Any) -> Document:
    if not isinstance(row, dict):
        raise SourceError(f"{where}: a record must be an object, not {type(row).__name__}")
    if "turns" in row:
        return Document(source.name, messages=_messages(row["turns"], "text", where))
    if "messages" in row:
        return Document(source.name, messages=_messages(row["messages"], "content", where))
    if "instruction" in row and "response" in row:
        context = _string(row, "context", where, "")
        instruction = _string(row, "instruction", where)
        prompt = f"{instruction}\n\n{context}" if context else instruction
        category = _string(row, "category", where, "")
        answer = _string(row, "response", where)
        return Document(
            source.name,
            messages=(user(prompt), assistant(answer)),
            context=context,
            fields={"instruction": instruction, "response": answer, "category": category},
        )
    if "question" in row and "answer" in row:
        question, answer = _string(row, "question", where), _string(row, "answer", where)
        return Document(source.name, messages=(user(question), assistant(answer)))
    if "text" in row:
        title = _string(row, "title", where, "")
        text = _string(row, "text", where)
        return Document(source.name, text=f"{title}\n\n{text}" if title else text)
    known = ", ".join(sorted(map(str, row))) or "none"
    raise SourceError(f"{where}: unknown record with fields {known}; known are {KNOWN_RECORDS}")


def _messages(rows: Any, key: str, where: str) -> tuple[Message, ...]:
    if not isinstance(rows, list) or not rows:
        raise SourceError(f"{where}: turns or messages must be a list with at least one entry")
    messages = []
    for row in rows:
        if not isinstance(row, dict) or row.get("role") not in ROLES:
            raise SourceError(f"{where}: every turn needs a role, one of {', '.join(ROLES)}")
        messages.append({"role": str(row["role"]), "content": _string(row, key, where)})
    return tuple(messages)


def _string(row: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str):
        raise SourceError(f"{where}: field {key!r} must be text, not {type(value).__name__}")
    return value.strip()


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
