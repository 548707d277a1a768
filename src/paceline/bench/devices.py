"""What our drafters would gain on other machines: recorded rounds, forwards from datasheets. Nothing is run there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from paceline.bench.metrics import BASELINE
from paceline.bench.record import PEER, Answer
from paceline.bench.setting import Setting
from paceline.cost.model import DEVICES, Machine, Rounds, Size, predict
from paceline.target.folder import is_gguf
from paceline.target.load import read_config
from paceline.target.shape import unsupported


def on_devices(setting: Setting, answers: Sequence[Answer]) -> dict[str, dict[str, list[float]]]:
    """{device: {method: [low, speed-up, high]}} for this model and our drafters."""
    if is_gguf(setting.folder) or setting.target.quantised or unsupported(config := read_config(setting.folder)):
        return {}  # the devices are GPUs, which run neither GGUF files nor blocks here
    size = Size.of(config, setting.target.dtype.itemsize, setting.target.dtype.itemsize)
    context = int(np.mean([t.prompt_tokens + len(t.tokens) / 2 for a in answers for t in a.turns] or [0]))
    predictions: dict[str, dict[str, list[float]]] = {name: {} for name in DEVICES}
    for method in dict.fromkeys(answer.method for answer in answers):
        rounds = recorded_rounds(answer for answer in answers if answer.method == method)
        if method == BASELINE or method.startswith(PEER) or rounds is None:
            continue
        for name, device in DEVICES.items():
            batch = setting.benchmark.options.batch
            predictions[name][method] = list(predict(rounds, size, Machine(device), batch=batch, context=context))
    return predictions


def recorded_rounds(answers: Iterable[Answer]) -> Rounds | None:
    """The rounds after the first token of all answers, for `paceline.cost.model.predict`; None if they are unknown."""
    replies = [reply for answer in answers if answer.failed is None for reply in answer.turns]
    if not replies or any(not r.lengths or r.nodes is None or len(r.nodes) != len(r.lengths) for r in replies):
        return None
    nodes = Counter(drafted + 1 for reply in replies for drafted in (reply.nodes or [])[1:])  # and the root
    tokens = sum(sum((reply.lengths or [])[1:]) for reply in replies)
    return Rounds(tokens, dict(nodes), sum(reply.parts.get("draft", 0.0) for reply in replies))
