"""Compiled loops for CPUs: logits to tokens, the steps of a layer, attention, products of few rows."""
