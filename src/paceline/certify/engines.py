"""What is certified: endpoints. An engine of this process is one (`paceline.serve.local.Local`), and so is another
library that `paceline.peers` has. Both take prompts of token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.draft.base import Drafter
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.formats.tokenizer import Tokenizer
from paceline.net.endpoint import Body, Endpoint
from paceline.serve.local import Local
from paceline.target.base import Target


def local(
    target: Target, tokenizer: Tokenizer | None, draft: str | Callable[[], Drafter], *, batch: int = 8, **options: Any
) -> Local:
    """Our engine. draft: a spec, or what makes a drafter; options: others of `Engine`."""
    drafter = create(draft) if isinstance(draft, str) else draft()
    engine = Engine(target, drafter, tokenizer=tokenizer, max_batch=batch, **options)
    return Local(engine, f"paceline, {drafter.name}", slots=batch)


def takes(engine: Endpoint, fields: Body) -> bool:
    """Whether an engine takes these fields of a request."""
    return engine.takes is None or fields.keys() <= engine.takes


def request(prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """A request for the answer to a prompt of token ids, with its tokens; greedy unless `fields` say otherwise."""
    return {"prompt": list(prompt), "return_token_ids": True, "temperature": 0.0, **fields}
