"""Our plug-ins as peers of a benchmark: the host's engine with one of our drafters.

    transformers-paceline,draft=sam    vllm-paceline,draft=sam    llama-cpp-paceline:model.gguf,draft=sam

In `draft` a ; stands for the comma between options: draft=sam;draft=20."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig

import paceline
from paceline.core.request import Delta
from paceline.core.sampling import SamplingParams
from paceline.draft.spec import exchanged
from paceline.net.completion import Completion
from paceline.peers import llama_cpp, transformers, vllm

SPEC = {"help": "the drafter, with ; for its commas"}
PACED = {"help": "cut drafts to what pays; else they are as the drafter makes them"}


@dataclass(frozen=True)
class InTransformersConfig:
    draft: str = field(default="sam", metadata=SPEC)
    paced: bool = field(default=True, metadata=PACED)


@dataclass(frozen=True)
class InVllmConfig(vllm.PlainConfig):
    draft: str = field(default="sam", metadata=SPEC)
    k: int = field(default=16, metadata={"help": "num_speculative_tokens: most tokens of a draft"})
    paced: bool = field(default=True, metadata=PACED)
    repair: bool = field(default=True, metadata={"help": "mend vLLM's sampling with drafts on a CPU"})
    v2: bool = field(default=False, metadata={"help": "vLLM's second model runner, which needs Triton"})


@dataclass(frozen=True)
class InLlamaCppConfig(llama_cpp.PlainConfig):
    draft: str = field(default="sam", metadata=SPEC)
    most: int = field(default=16, metadata={"help": "most tokens of a draft"})
    paced: bool = field(default=True, metadata=PACED)


def _spec(config: Any) -> str:
    return exchanged(str(config.draft), ";", ",")


class InTransformers(transformers.Plain):
    """`model.generate(custom_generate=paceline.plugins.transformers.generate)`."""

    Config = InTransformersConfig

    def forget(self) -> None:
        from paceline.plugins.transformers import forget

        forget(self.model)

    def close(self) -> None:
        if self.model is not None:
            self.forget()
        super().close()

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        from paceline.plugins.transformers import generate

        asked, limit = params[0], max(self.setup.max_new(prompt, params[0]) for prompt in prompts)
        if not asked.is_greedy and asked.seed is not None:
            torch.manual_seed(asked.seed)
        rounds: list[list[tuple[float, Delta]]] = [[] for _ in prompts]
        began = perf_counter()
        ids, mask = transformers.padded(prompts, self.model.device)
        out = self.model.generate(
            ids,
            attention_mask=mask,
            generation_config=GenerationConfig(**transformers.how(asked, limit)),
            custom_generate=generate,
            draft=_spec(self.config),
            paced=self.config.paced,
            on_round=lambda delta: rounds[delta.index].append((perf_counter() - began, delta)),
        )
        made = out[:, ids.shape[1] :].tolist()
        seconds = perf_counter() - began
        return [
            self.setup.turn(
                prompt, row, asked, seconds=seconds, lengths=[len(delta.tokens) for _, delta in deltas],
                times=[when for when, _ in deltas], nodes=[delta.nodes for _, delta in deltas],
                depths=[delta.depth for _, delta in deltas],
            )
            for prompt, row, deltas in zip(prompts, made, rounds, strict=True)
        ]  # fmt: skip


class InVllm(vllm.Plain):
    """vLLM with `paceline.plugins.vllm.Proposer`, or `vllm_v2.Worker`. PYTHONPATH leads to our package."""

    Config = InVllmConfig
    learns = True

    def speculative(self) -> dict[str, Any]:
        ours = {"method": "ngram"} if self.config.v2 else {"model": "paceline.plugins.vllm.Proposer"}
        return {**ours, "num_speculative_tokens": self.config.k}

    def additional(self) -> dict[str, Any]:
        ours = {"draft": _spec(self.config), "paced": self.config.paced, "repair": self.config.repair}
        more = {"worker-cls": "paceline.plugins.vllm_v2.Worker"} if self.config.v2 else {}
        return {"additional-config": json.dumps({"paceline": ours}), **more}

    def environment(self) -> dict[str, str]:
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if self.config.v2 else {}
        ours = os.pathsep.join(str(Path(part).parent) for part in paceline.__path__)
        return super().environment() | {"PYTHONPATH": ours} | runner

    def _samples_right(self) -> bool:
        return self.config.repair or super()._samples_right()


class InLlamaCpp(llama_cpp.Plain):
    """llama-cpp-python with `paceline.plugins.llama_cpp.draft`."""

    Config = InLlamaCppConfig

    def open(self) -> None:
        super().open()
        from paceline.plugins.llama_cpp import check

        check(self.llama)

    def _draft_model(self, drafting: dict[str, int]) -> Any:
        from paceline.plugins.llama_cpp import draft

        return draft(_spec(self.config), most=self.config.most, paced=self.config.paced)
