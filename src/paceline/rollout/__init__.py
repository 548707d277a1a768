"""Rollouts for reinforcement learning that reuse the last epoch's answers, with a stated guarantee.

store     the last answer to every copy of every prompt
rules     which of its tokens stand: exact ones, and the published one, which is not
run       `Engine.rollout`
trl, verl these rollouts inside the two trainers; imported only by those who use them
demo      a task that shows what each rule saves and costs
"""

from paceline.rollout.rules import RULES, rule_of
from paceline.rollout.run import Figures, Rollout, Rollouts, rollout
from paceline.rollout.store import Entry, Key, RolloutStore, digest

__all__ = ["RULES", "Entry", "Figures", "Key", "Rollout", "RolloutStore", "Rollouts", "digest", "rollout", "rule_of"]
