"""Files of models and heads: folders, GGUF, adapters, tokenizers. Readers return a Checkpoint, or a head's tensors."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # Its modules come from several distributions.
