"""Rollouts with reuse as an agent loop of verl, over its servers. Needs verl (tested with 0.9.1), the extra `watch`,
and its trainer's own rollout at temperature 1 without top-p and top-k.

In a file that `actor_rollout_ref.rollout.agent.agent_loop_config_path` names:

    - name: rollout_reuse
      _target_: paceline.rollout.verl.RolloutReuseLoop
      store: /shared/answers.rollouts
      rule: residual

and `actor_rollout_ref.rollout.agent.default_agent_loop=rollout_reuse`. The servers must allow as many prompt
log-probabilities as `top`."""

from __future__ import annotations

from functools import cache
from math import inf, log
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from paceline.core.noise import Noise
from paceline.errors import PacelineError
from paceline.net.completion import Completion
from paceline.net.endpoint import Body, Endpoint
from paceline.rollout.rules import TOP
from paceline.rollout.served import ServedRule, answer, generate, score
from paceline.rollout.store import Key, RolloutStore, digest, visit_after


@cache
def opened(path: str) -> RolloutStore:
    """The store of a path, one in each process, because verl makes an agent loop for every sample."""
    return RolloutStore(path)


class RolloutReuseLoop(AgentLoopBase):
    """One turn: a prompt, and an answer that reuses the last one.

    store           a path that all agent-loop workers see.
    rule, lenience  residual, one-hot or plain; plain is not lossless and alone takes a lenience.
    top             best tokens that are stored of each position, for residual.
    seed            of the rules' randomness."""

    def __init__(
        self, *args: Any, store: str, rule: str = "residual", lenience: float | None = None, top: int = TOP,
        seed: int = 0, **kwargs: Any,
    ):  # fmt: skip
        super().__init__(*args, **kwargs)
        self.store = opened(store)
        self.rule, self.seed = ServedRule(rule, lenience, top), seed

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """As verl's single-turn loop. Requests with filters or another temperature (validation) use no old answer."""
        budget = self.rollout_config.response_length
        prompt = list(await self.ct_build_initial_tokens(list(kwargs["raw_prompt"])))
        server = VerlServer(self.server_manager, sampling_params)
        if not _is_unfiltered(sampling_params):
            if _is_training(sampling_params, self.rollout_config):
                raise PacelineError(
                    "verl's servers score at temperature 1 without filters, but these rollouts are sampled otherwise "
                    f"({sampling_params}); set temperature=1, top_p=1, top_k=-1."
                )
            tokens, reused, logprobs = await generate(server, prompt, budget), 0, None
        else:
            # verl repeats each prompt n times in a row and numbers the rows of a batch by their priority.
            row = int(kwargs.get("priority", 0))
            key = Key(digest(prompt), row % int(self.rollout_config.n))
            old = self.store.get(key)
            noise = Noise(key.seed(self.seed, row, visit_after(old)))
            ends = frozenset([self.tokenizer.eos_token_id])
            version = old.version + 1 if old else 0
            done = await answer(server, prompt, old, self.rule, budget=budget, ends=ends, noise=noise, version=version)
            self.store.put([(key, done.entry)])
            tokens, reused = done.tokens, done.reused
            wanted = bool(sampling_params.get("logprobs"))
            scored = await score(server, [*prompt, *tokens], len(prompt), 0) if wanted else []
            logprobs = [log(place.token) if place.token else -inf for place in scored] if wanted else None
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=tokens[:budget],
            response_mask=[1] * len(tokens[:budget]),
            response_logprobs=logprobs,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={"turn_scores": [], "tool_rewards": [], "reused_tokens": reused},
        )


class VerlServer(Endpoint):
    """verl's client as an endpoint; it takes what `served` asks for."""

    name = "verl"

    def __init__(self, client: Any, sampling_params: dict[str, Any]):
        super().__init__()
        self._client, self._params = client, sampling_params
        self._id = uuid4().hex  # one for a row, so that its requests go to one server, whose cache has the prompt

    async def complete(self, body: Body) -> Completion:
        """verl does not report a token of the prompt that is not among the best."""
        params = {**self._params, **{name: body[name] for name in ("max_tokens", "prompt_logprobs") if name in body}}
        if "logit_bias" in body:
            params["logit_bias"] = {int(token): bias for token, bias in body["logit_bias"].items()}
        output = await self._client.generate(self._id, prompt_ids=list(body["prompt"]), sampling_params=params)
        places = [output.extra_fields.get(name, ()) for name in ("prompt_ids", "prompt_logprobs")]
        # Entry i of both lists is about token i + 1; the last one is padding.
        known = [dict(zip(ids, logprobs, strict=True)) for ids, logprobs in zip(*places, strict=True)]
        return Completion(tokens=list(output.token_ids), prompt_logprobs=[{}, *known[:-1]])


def _is_unfiltered(params: dict[str, Any]) -> bool:
    filters = params.get("top_p", 1.0) == 1.0 and params.get("top_k", -1) in (-1, 0)
    return params.get("temperature", 1.0) == 1.0 and filters and params.get("repetition_penalty", 1.0) == 1.0


def _is_training(params: dict[str, Any], config: Any) -> bool:
    """Whether a request is sampled as the trainer's rollouts are."""
    return all(params.get(name) == config.get(name) for name in ("temperature", "top_p", "top_k"))
