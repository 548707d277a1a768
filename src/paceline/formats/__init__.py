"""Models and heads as files hold them: folders, GGUF, adapters, tokenizers. What is read is a Checkpoint or a Head."""
