"""Logits to tokens on a CPU: compiled loops."""
