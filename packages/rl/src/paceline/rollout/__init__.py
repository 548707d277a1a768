"""Rollouts for reinforcement learning that reuse the last epoch's answers, with a stated guarantee.

store     the last answer to every copy of every prompt
rules     which of its tokens are kept: exact rules, and the published one, which is not exact
run       `rollout`: answers to a batch of prompts
served    the same over a server that generates and scores
trl, verl these rollouts inside the two trainers; import them yourself, because they need the trainers' packages
policy    the engine of a model whose weights change"""

from paceline.rollout.rules import RULES, rule_of
from paceline.rollout.run import Figures, Rollout, Rollouts, rollout
from paceline.rollout.store import Entry, Key, RolloutStore, digest

__all__ = ["RULES", "Entry", "Figures", "Key", "Rollout", "RolloutStore", "Rollouts", "digest", "rollout", "rule_of"]
