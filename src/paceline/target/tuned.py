"""What a fine-tuned model was made from, for reports: answers are exact for the tuned weights, and these are others."""

from __future__ import annotations

from pathlib import Path

from paceline.jsonl import NotJSON, loads

TUNED_FILE = "noise.json"
"""Written by `paceline train noise` beside the weights."""


def tuned_note(folder: str) -> str | None:
    """One sentence for a model that `paceline train noise` made; None for any other."""
    try:
        start = loads((Path(folder).expanduser() / TUNED_FILE).read_bytes())["tuned_from"]["name"]
    except (OSError, NotJSON, KeyError, TypeError):
        return None
    return (
        f"The model was fine-tuned with noise from {start}, so it is another model: lossless means lossless for these "
        f"weights, and {start} may answer otherwise."
    )
