"""A small verifiable task, learnt with GRPO on a processor: what each rule of reuse saves, and what it costs.

    paceline rollout demo --rules vanilla,residual,one-hot,plain:0.5 --epochs 24 --seeds 3 --out DIR
"""
