"""Evaluations of what a model says, each a package of its own; `paceline eval` runs them. They need paceline[eval]."""
