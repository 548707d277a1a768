"""Specification alignment: does an answer keep a scenario's written rules? SpecBench's data, Align3 and its rivals.

Zhang et al. 2025, "Reasoning over Boundaries: Enhancing Specification Alignment via Test-time Deliberation" (arXiv
2509.14760). A scenario has safety rules and behavioural rules; a method answers every prompt under them; a judge
labels every rule of every answer; one number, the Specification Alignment Rate (SAR), says how it went:

    data -> method(backend) -> generations.jsonl -> judge(backend) -> judgements.jsonl -> figures -> report

`run.py` is that line; `backends/` knows endpoints and our engine, and nothing of rules.
"""
