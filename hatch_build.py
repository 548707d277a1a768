"""What our distributions need of each other and of others, for hatchling: each pyproject.toml lists it at this hook.

No index has them. So in a checkout one is installed from its folder there, `name @ file://...`. Where the folders are
not there, and for a release, PACELINE_RELEASE=1, it is named with its version, which is the same for all. An sdist has
no folders beside it, so its pyproject.toml says all of this itself."""

import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

HERE = Path(__file__).resolve().parent


class Needs(MetadataHookInterface):
    """Fills in the dependencies and the extras."""

    def update(self, metadata: dict[str, Any]) -> None:
        extras = self.config.get("optional-dependencies", {})
        metadata["dependencies"] = [placed(line, metadata) for line in self.config["dependencies"]]
        metadata["optional-dependencies"] = {name: [placed(line, metadata) for line in extras[name]] for name in extras}


def placed(line: str, metadata: dict[str, Any]) -> str:
    """A requirement, if it is one of ours with its folder or its version."""
    found = re.fullmatch(r"(paceline)(?:-(\w+))?(\[.*])?", line)
    if found is None or line.partition("[")[0] == metadata["name"]:
        return line
    folder = HERE / "packages" / found[2] if found[2] else HERE
    if (folder / "pyproject.toml").exists() and not os.environ.get("PACELINE_RELEASE"):
        return f"{line} @ {folder.as_uri()}"
    return f"{line}=={metadata['version']}"


class Alone(BuildHookInterface):
    """Puts into an sdist what lies outside of its folder."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._written = TemporaryDirectory()
        root, own = Path(self.root), Path(self._written.name) / "pyproject.toml"
        own.write_text(stated((root / "pyproject.toml").read_text("utf-8"), self.metadata.core_raw_metadata), "utf-8")
        ours = {str(own): "pyproject.toml", str((root / "LICENSE").resolve()): "LICENSE"}
        others = {file: place for file, place in build_data["force_include"].items() if place not in ours.values()}
        build_data["force_include"] = others | ours

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._written.cleanup()


def stated(pyproject: str, metadata: dict[str, Any]) -> str:
    """A pyproject.toml with what our hooks fill in written down, and without the hooks. TOML reads JSON's lists."""
    ours = re.compile(r"(?m)^\[tool\.hatch\.(version|metadata|build\.targets\.sdist)")
    tables = re.split(r"(?m)^(?=(?:#.*\n)*\[)", pyproject)
    kept = "".join(table for table in tables if not ours.search(table))
    lines = [f"version = {json.dumps(metadata['version'])}", f"dependencies = {json.dumps(metadata['dependencies'])}"]
    extras = metadata.get("optional-dependencies") or {}
    named = "".join(f"{name} = {json.dumps(lines)}\n" for name, lines in extras.items())
    kept = re.sub(r"(?m)^dynamic = .*$", lambda _: "\n".join(lines), kept)
    return kept + (f"\n[project.optional-dependencies]\n{named}" if named else "")
