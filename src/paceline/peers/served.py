"""Engines that are servers: begun for a run, asked over HTTP with token ids, and ended.

    vllm serve Qwen/Qwen3-0.6B --port {port}        any server of OpenAI's API, as it is begun
    llama-server -m model.gguf --port {port}        llama.cpp's, whose own route says what each round drafted

Time is taken here, from the request to the end of the answer, as the server's users have it. Where a server returns
token ids with each event of a stream, an event is a round; what was drafted is read from its answers or /metrics."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx2

from paceline.core.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.net.client import CONNECT_SECONDS, Retry
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import START_SECONDS, Started
from paceline.net.servers import Drafting
from paceline.peers import NotInstalled
from paceline.peers.peer import Peer, sampling
from paceline.peers.setup import Setup, cut

THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
ANSWER_SECONDS = 3600.0  # After so long without a byte a server counts as hanging.
LLAMA_CPP = "llamacpp"  # The name that llama.cpp's server gives itself.


def environment(setup: Setup) -> dict[str, str]:
    """Our environment, without variables that lead another interpreter to our packages,
    or to a GPU the target does not use."""
    ours = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    if setup.device == "cpu":
        ours["CUDA_VISIBLE_DEVICES"] = ""
    # numba, which vLLM's n-grams are compiled with, sets the number of torch's threads to its own.
    return ours | ({} if setup.threads is None else dict.fromkeys(THREADS, str(setup.threads)))


@dataclass(frozen=True)
class CommandConfig:
    command: str = field(kw_only=True)


class Served(Peer):
    """A server that is begun by a command. engine, how: its name, and how to install it, for errors.

    learns  whether its drafter keeps what it has seen beyond a request; it then starts anew to forget."""

    Config: type = CommandConfig
    engine, how, learns = "the server", "see its documentation", True

    def __init__(self, name: str, setup: Setup, config: Any, slots: int | None = None):
        super().__init__(name, slots or setup.batch, setup.tokenizer, setup.ends)
        self.setup, self.config = setup, config
        self.server: Started | None = None

    def command(self) -> str | list[str]:
        """What begins it; {port} stands for its port."""
        return str(self.config.command)

    def environment(self) -> dict[str, str]:
        """Its variables."""
        return environment(self.setup)

    def python(self) -> str:
        """The interpreter of its environment; NotInstalled if none was named."""
        if self.setup.python is None:
            raise NotInstalled(f"{self.name}: {self.engine} wants an environment of its own: {self.how}")
        return self.setup.python

    def installed(self, program: str) -> dict[str, Any]:
        """The JSON that a program prints in its environment. Raises NotInstalled where it cannot be run."""
        python = self.python()
        try:
            done = subprocess.run(
                [python, "-c", program], env=self.environment(), capture_output=True, text=True, timeout=START_SECONDS
            )
        except OSError as error:
            raise NotInstalled(f"{self.name}: {python} cannot be run ({error.strerror}): {self.how}") from None
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1][:300]
            raise NotInstalled(f"{self.name}: {python} cannot run it ({why}): {self.how}")
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))

    def open(self) -> None:
        server = Started(
            self.command(), env=self.environment(), slots=min(self.slots, 1024), timeout=ANSWER_SECONDS,
            retry=Retry(tries=1),
        )  # fmt: skip
        try:
            server.open()
        except PacelineError as error:
            raise PacelineError(f"{self.name}: {error}") from None
        self.server = server
        with self._awake() as server:
            server.ask([{"prompt": [1], "max_tokens": 1}])
            self.facts |= {"asked": "over HTTP on this machine", "server": server.owner}

    def close(self) -> None:
        super().close()
        if self.server is not None:
            self.server.close()
            self.server = None

    def forget(self) -> None:
        if self.learns and self.server is not None:
            self.close()
            self.open()

    def wake(self, seconds: float) -> None:
        began = perf_counter()
        while self.server is not None and perf_counter() - began < seconds:
            with self._awake() as server:
                server.ask([{"prompt": [1], "max_tokens": 2, "temperature": 0.0}])

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        limits = [self.setup.max_new(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        if self.server is None:
            raise PacelineError(f"{self.name} is not running")
        with self._awake() as server:
            if server.owner == LLAMA_CPP:
                return [self._of_llama_cpp(*one) for one in zip(prompts, params, limits, strict=True)]
            return self._of_openai(server, prompts, params, limits)

    @contextmanager
    def _awake(self) -> Iterator[Started]:
        """The server, which is paused otherwise."""
        assert self.server is not None
        self.server.pause(False)
        try:
            yield self.server
        except (CompletionError, httpx2.HTTPError, ValueError, AttributeError) as error:
            raise PacelineError(f"{self.name}: {error}") from None
        finally:
            self.server.pause(True)

    def _of_openai(
        self, server: Started, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], limits: Sequence[int]
    ) -> list[Completion]:
        """Answers by OpenAI's route for texts, all asked for at once."""
        bodies = [
            {
                "prompt": list(map(int, prompt)), "max_tokens": limit, **sampling(one), "seed": one.seed or 0,
                "stop_token_ids": list(one.stop_token_ids), "ignore_eos": True,  # Only these tokens end an answer.
                "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
            }
            for prompt, one, limit in zip(prompts, params, limits, strict=True)
        ]  # fmt: skip
        before = Drafting.read(server.url)
        done = server.ask(bodies, len(bodies))
        for prompt, asked, limit, one in zip(prompts, params, limits, done, strict=True):
            by_round = one.tokens and len(one.counts) == len(one.times) and all(one.counts)
            one.tokens = cut(one.tokens, asked.stop_token_ids, limit)
            one.text = self.setup.decode(one.tokens) if one.tokens else one.text
            one.usage = {"completion_tokens": len(one.tokens)} | one.usage | {"prompt_tokens": len(prompt)}
            if by_round:
                one.lengths = one.counts
                one.speculation |= {"num_rounds": len(one.counts)}
            else:
                one.times = []
        if before is not None and (after := Drafting.read(server.url)) is not None:
            done[0].batch = after.since(before).counts()
        return done

    def _of_llama_cpp(self, prompt: Sequence[int], params: SamplingParams, limit: int) -> Completion:
        """An answer by llama.cpp's own route. What it adds by default to what is asked for is off."""
        asked = {
            "prompt": list(map(int, prompt)), "n_predict": limit, "temperature": params.temperature,
            "seed": params.seed or 0, "samplers": ["penalties", "top_k", "top_p", "temperature"],
            "top_k": params.top_k, "top_p": params.top_p, "repeat_penalty": params.repetition_penalty,
            "cache_prompt": False, "return_tokens": True, "timings_per_token": True, "stream": True,
        }  # fmt: skip
        assert self.server is not None
        tokens, events, began = list[int](), list[tuple[float, int, int, int]](), perf_counter()
        for event in _events(f"{self.server.url.removesuffix('/v1')}/completion", asked):
            timings, new = event.get("timings") or {}, event.get("tokens") or []
            if new and not event.get("stop"):
                tokens += new
                drafted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
                events.append((perf_counter() - began, len(new), *drafted))
        seconds, (times, lengths, nodes) = perf_counter() - began, rounds(events)
        return self.setup.turn(prompt, tokens, params, lengths=lengths, times=times, nodes=nodes, seconds=seconds)


def _events(url: str, asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream, as they come."""
    timeout = httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
    with httpx2.stream("POST", url, json=dict(asked), timeout=timeout) as response:
        if response.status_code != 200:
            raise ValueError(response.read().decode("utf-8", "replace")[:300])
        for line in response.iter_lines():
            if line.startswith("data: ") and line[6:].strip() != "[DONE]":
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(str(event["error"])[:300])
                yield event


def rounds(events: Sequence[tuple[float, int, int, int]]) -> tuple[list[float], list[int], list[int]]:
    """Turn events into rounds: their times, numbers of tokens, and numbers of drafted tokens.

    events  (seconds, tokens, tokens drafted so far, tokens accepted so far) of every event. The tokens of a round come
            one by one, after the round's counts. A draft with a accepted tokens brings a + 1 tokens."""
    times: list[float] = []
    lengths: list[int] = []
    nodes: list[int] = []
    drafted = accepted = open_tokens = 0
    for seconds, count, drafted_now, accepted_now in events:
        if open_tokens <= 0:
            open_tokens = accepted_now - accepted + 1
            lengths.append(0)
            times.append(0.0)
            nodes.append(drafted_now - drafted)
            drafted, accepted = drafted_now, accepted_now
        lengths[-1] += count
        times[-1] = seconds
        open_tokens -= count
    return times, lengths, nodes
