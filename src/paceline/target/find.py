"""Where a model is: a folder here, or a repository of the Hugging Face hub. Knows nothing of what is in it."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from paceline.errors import ModelError, meant, shortened

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
"""Of a hub repository: configuration and tokenizer."""
NOT_OURS = ["*/*", "consolidated*"]
"""Of a hub repository: sub-folders, and second copies of the weights in another layout."""


def name_of(model: str | Path) -> str:
    """What a model is called in messages."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else str(model)


def find(model: str | Path, files: list[str]) -> Path:
    """The folder of `model`: itself, or the local copy of a hub repository, downloaded if necessary.

    files  patterns of the repository's files that are wanted."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        what = "what is asked for needs a model folder" if is_gguf(path) else "name its folder"
        raise ModelError(f"{path} is a file; {what}, which holds weights, config.json and tokenizer together")
    if _is_path(model):
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        where = "" if path.parent.is_dir() else f" (nor is there a folder {path.parent})"
        raise ModelError(f"there is no folder {path}{where}.{meant(path.name, siblings)}")
    return _from_hub(str(model), files)


def _is_path(model: str | Path) -> bool:
    """Whether `model` can only be a path: a hub id is `name` or `owner/name`."""
    text = str(model)
    owner = re.fullmatch(r"(\w[\w.-]*)/[\w.-]+", text)
    if isinstance(model, Path) or (owner and Path(owner[1]).is_dir()):
        return True
    return not owner and not re.fullmatch(r"\w[\w.-]*", text)


def _from_hub(name: str, files: list[str]) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=files, ignore_patterns=NOT_OURS))
    except GatedRepoError as error:
        raise ModelError(
            f"{name} is gated: accept its terms on https://huggingface.co/{name}, then run `hf auth login`"
        ) from error
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        why = "no such model" if isinstance(error, RepositoryNotFoundError) else "no connection, and no earlier copy"
        here = meant(name, (p.name for p in Path().iterdir() if p.is_dir()))
        raise ModelError(
            f"{name!r} is neither a folder here nor reachable on the hub ({why}); "
            f"a local folder works: paceline generate ./path/to/folder.{here}"
        ) from error


def is_gguf(model: str | Path) -> bool:
    """Whether `model` names a GGUF file: by its name's end, or `owner/name:FILE.gguf` on the hub."""
    return str(model).endswith(".gguf")


def gguf_of(model: str | Path) -> Path:
    """The file `model`, downloaded if it is owner/name:FILE.gguf. ModelError if there is none."""
    path = Path(model).expanduser()
    if path.is_file():
        return path
    repository, colon, file = str(model).partition(":")
    if not colon:
        raise ModelError(f"there is no file {path}; a file of the hub is written owner/name:FILE.gguf")
    try:
        return Path(huggingface_hub.hf_hub_download(repository, file))
    except Exception as error:  # of many libraries below
        why = shortened(" ".join(str(error).split()))
        raise ModelError(f"{file} of {repository} cannot be had from the hub: {why}") from error
