"""Evaluations of what a model says, for `paceline eval`. Their packages are the extras eval and vision."""
