"""Evaluations of what a model says, each a package of its own; `paceline eval` runs them. Their packages are the extras
eval and vision."""
