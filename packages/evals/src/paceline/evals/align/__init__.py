"""Specification alignment: whether answers keep a scenario's written rules. SpecBench's data, Align3, other methods.

Zhang et al. 2025, "Reasoning over Boundaries: Enhancing Specification Alignment via Test-time Deliberation" (arXiv
2509.14760). A scenario has safety rules and behavioural rules; a method answers every prompt under them; a judge
labels every rule of every answer; the Specification Alignment Rate (SAR) sums it up:

    data -> method(backend) -> generations.jsonl -> judge(backend) -> judgements.jsonl -> figures -> report

`run` goes through these steps; `backend` asks endpoints and knows no rules, and `local` opens our engine as one."""
