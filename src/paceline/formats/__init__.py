"""Files of models and heads: folders, GGUF, adapters, tokenizers. Readers return a Checkpoint, or a head's tensors."""
