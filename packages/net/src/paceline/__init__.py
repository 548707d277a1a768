"""Paceline: language models answer faster without changing what they say.

Cheap drafters propose tokens, the target model verifies them in one forward, and what comes out is exactly
what the target alone would have written. The loop is in `paceline.engine.engine`; start there.

    from paceline.engine.engine import Engine
    from paceline.core.sampling import SamplingParams
    engine = Engine("smollm2", draft="sam")
    chat = [{"role": "user", "content": "Hello! What can you do?"}]
    print(engine.generate([chat], SamplingParams(max_tokens=64))[0].text)
"""

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

from paceline import processor
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.core.params import SamplingParams
    from paceline.core.tree import DraftTree
    from paceline.engine.engine import Engine

__path__ = extend_path(__path__, __name__)  # Its modules come from several distributions.
__version__ = "0.2.0"
__all__ = ["DraftTree", "Engine", "PacelineError", "SamplingParams", "__version__"]


# They bring torch and transformers, or NumPy, with them; `paceline --help` should not wait for that.
_LATER = {
    "Engine": "paceline.engine.engine",
    "SamplingParams": "paceline.core.params",
    "DraftTree": "paceline.core.tree",
}


processor.pass_on()


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
