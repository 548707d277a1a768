"""The rules by which the official loader reads a data set, written anew from their description: an independent reader.

A subset's folder has image2text.json and text2image.json; each query has K keys, texts or paths below the folder, and a
label; candidates are stacked, so K is one number in a subset.
"""

import json
from pathlib import Path

from PIL import Image


def load(root: Path, subset: str) -> dict[str, list[dict]]:
    """Items as the official data loaders yield them, pictures opened as RGB."""
    folder = root / subset
    items: dict[str, list[dict]] = {"i2t": [], "t2i": []}
    for query in json.loads((folder / "image2text.json").read_text()):
        picture = Image.open(folder / query["query"]).convert("RGB")
        items["i2t"].append({"query_image": picture, "candidate_texts": query["keys"], "label": query["label"]})
    for query in json.loads((folder / "text2image.json").read_text()):
        pictures = [Image.open(folder / key).convert("RGB") for key in query["keys"]]
        items["t2i"].append({"query_text": query["query"], "candidate_images": pictures, "label": query["label"]})
    return items
