"""Checkpoints of others: a module a format, which makes our names and options of a config.json and its tensors."""
