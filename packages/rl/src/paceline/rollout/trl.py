"""Rollouts with reuse inside TRL's GRPOTrainer, in any number of processes.

    from paceline.rollout import RolloutStore
    from paceline.rollout.trl import RolloutReuse

    trainer = GRPOTrainer(..., rollout_func=RolloutReuse(RolloutStore("answers.rollouts")))

Paceline's engine runs the trainer's own model, so the same code verifies old answers and draws new tokens.
`rollout_func` is experimental in TRL; this is written for TRL 1.16."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object

from paceline.core.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.rollout.policy import Policy
from paceline.rollout.rules import rule_of
from paceline.rollout.run import Figures, Rollouts, rollout
from paceline.rollout.store import Key, RolloutStore, digest, numbered

DRAFT = "past-answer,first=8+sam,past=65536"
"""The old answer first; after the first different token, continuations from other answers."""

EVALUATION = 0x5EED  # Changes the seed for evaluation, which must not share the noise of training.


class RolloutReuse:
    """Pass it as `rollout_func`. Evaluation neither uses nor changes the store.

    rule, lenience  as in `paceline.rollout.rules`; only the rule plain, which is not lossless, takes a lenience.
    seed       of all randomness, together with the trainer's step.
    max_batch  answers decoded at once.
    dtype      of the rollouts on a processor; None: the trainer's weights'. A trainer may keep float32 weights, and
               answers drawn in bfloat16 are those of the rounded policy, whose probabilities are returned.
    figures    sums over this process so far; `last`: of the last call."""

    def __init__(
        self, store: RolloutStore, *, rule: str = "residual", lenience: float | None = None, draft: str = DRAFT,
        seed: int = 0, max_batch: int = 64, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        self.rule = rule_of(rule, lenience=lenience, seed=seed)
        self.store, self.draft, self.seed, self.max_batch, self.dtype = store, draft, seed, max_batch, dtype
        self.figures = self.last = Figures()
        self._policy: Policy | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's contract: one answer for each of `prompts`, this process's slice with repetitions."""
        _refuse(trainer)
        ids, _, multimodal = trainer._tokenize_prompts(prompts)
        if multimodal:
            raise PacelineError("Rollouts with reuse are for text; these prompts have images or other fields.")
        if trainer.model.training:
            answers = self._reused(ids, trainer)
        else:
            answers = self._answer(ids, trainer, RolloutStore(), rule="vanilla", seed=self.seed ^ EVALUATION)
        return {
            "prompt_ids": [list(prompt) for prompt in ids],
            "completion_ids": [answer.tokens for answer in answers.answers],
            "logprobs": [answer.logprobs.tolist() for answer in answers.answers],
        }

    def _reused(self, ids: Sequence[Sequence[int]], trainer: Any) -> Rollouts:
        """Answers for training, which reuse those in the store and replace them."""
        keys = _keys(ids, trainer.accelerator)
        rollouts = self._answer(ids, trainer, self.store, rule=self.rule, seed=self.seed, keys=keys)
        if trainer.accelerator.num_processes > 1 and not self.store.is_shared:
            # In the next epoch other processes may get copies of these prompts.
            mine = [(key, self.store.get(key)) for key in keys]
            self.store.put((key, entry) for key, entry in gather_object(mine) if entry is not None)
        self.last, self.figures = rollouts.figures, self.figures + rollouts.figures
        self._log(rollouts, trainer)
        return rollouts

    def _answer(self, ids: Sequence[Sequence[int]], trainer: Any, store: RolloutStore, **how: Any) -> Rollouts:
        """Answers of the trainer's model with its present weights; `how`: options of `rollout`."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        if self._policy is None or self._policy.model is not model:
            ends = trainer.eos_token_ids
            most, dtype = self.max_batch, self.dtype
            self._policy = Policy(model, self.draft, eos_token_ids=ends, max_batch=most, dtype=dtype)
        with self._policy.engine() as engine:
            return rollout(engine, ids, store, params=sampling_of(trainer), version=trainer.state.global_step, **how)

    def _log(self, rollouts: Rollouts, trainer: Any) -> None:
        """Add figures to the trainer's log."""
        of, name = rollouts.figures, "rollout" if rollouts.lossless else "rollout_not_lossless"
        values = {"reuse": of.reuse, "full_reuse": of.full_reuse, "decoded_tokens": of.decoded, "drift": of.mean_drift}
        for key, value in values.items():
            trainer._metrics["train"][f"{name}/{key}"].append(float(value))


def sampling_of(trainer: Any) -> SamplingParams:
    """How the trainer samples. `_refuse` rejects other settings that change the distribution."""
    return SamplingParams(
        temperature=trainer.temperature,
        top_p=trainer.top_p if trainer.top_p is not None else 1.0,
        top_k=max(trainer.top_k or 0, 0),
        min_p=trainer.min_p or 0.0,
        repetition_penalty=trainer.repetition_penalty or 1.0,
        max_tokens=trainer.max_completion_length,
    )


def _refuse(trainer: Any) -> None:
    """PacelineError for settings under which our probabilities would not be those of the sampled distribution."""
    given = trainer.args.generation_kwargs
    if given:
        raise PacelineError(
            f"generation_kwargs has {', '.join(given)}, which rollouts with reuse do not know; set temperature, top_p, "
            "top_k, min_p and repetition_penalty by their own names."
        )
    if trainer.use_vllm:
        raise PacelineError("use_vllm is on, but these rollouts run in Paceline's own engine; set use_vllm=False.")
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    if trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3):
        raise PacelineError("The model's weights are spread over processes (FSDP, ZeRO-3); rollouts need them whole.")


def _keys(ids: Sequence[Sequence[int]], accelerator: Any) -> list[Key]:
    """Keys of this process's prompts: copies are numbered over all processes, in the order of their ranks."""
    mine = [digest(prompt) for prompt in ids]
    slices = gather_object([mine])
    before = sum(len(part) for part in slices[: accelerator.process_index])
    return numbered([name for part in slices for name in part])[before : before + len(mine)]
