"""Benchmarks: suites, the runner, metrics and reports."""
