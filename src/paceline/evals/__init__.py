"""Evaluations of models' answers, for `paceline eval`. They need the extras eval and vision."""
