"""What our distributions need of each other and of others, for hatchling: each pyproject.toml lists it at this hook.

No index has them. So in a checkout one is installed from its folder there, `name @ file://...`. Where the folders are
not there, and for a release, PACELINE_RELEASE=1, it is named with its version, which is the same for all."""

import os
import re
from pathlib import Path
from typing import Any

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
