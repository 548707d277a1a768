"""`paceline chat`: a conversation on the terminal, every turn drafted and verified."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.cli import options
from paceline.cli.parameters import with_options
from paceline.cli.show import Screen, statistics
from paceline.core.tally import Tally, over
from paceline.engine.options import DraftOrBrought, EngineOptions
from paceline.errors import PacelineError, PromptError, printable

if TYPE_CHECKING:
    from paceline.cli.drive import Answer
    from paceline.core.sampling import SamplingParams
    from paceline.engine.engine import Engine

HELP = """/reset  forget the conversation
/stats  tokens, rounds and speed so far
/help   this
/quit   leave (Ctrl-D does too)
Ctrl-C stops an answer and keeps the chat."""


@with_options
def chat(
    model: options.Model = options.SMOLLM2,
    draft: DraftOrBrought = None,
    tune: options.Tune = None,
    file: options.Document = None,
    max_tokens: options.MaxTokens = 512,
    sampling: options.SamplingOptions = options.SamplingOptions(),
    color: options.Color = False,
    running: EngineOptions = EngineOptions(),
) -> int:
    """Talk with a model. /help lists the commands.

    \b
    paceline chat                               with smollm2
    paceline chat path/to/model --draft sam --color
    paceline chat --file text.txt                 about a text
    """
    params = sampling.params(max_tokens=max_tokens)
    document = "" if file is None else options.document_in(file)
    draft = options.tuned(options.drafter_for(model, draft), tune)
    engine = options.open_engine(model, draft, running)
    if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
        raise PromptError(f"{model} has no chat template; `paceline generate {model} ... --raw` continues plain text")
    screen = Screen(color)
    screen.note(*engine.target.notes, *engine.drafter.notes)
    Conversation(engine, replace(params, **sampling.unsaid(engine, screen)), screen, document).run()
    return 0


class Conversation:
    """The messages so far and their statistics. document: a text that stands in front of the first message."""

    def __init__(self, engine: Engine, params: SamplingParams, screen: Screen, document: str = ""):
        self.engine, self.params, self.screen, self.document = engine, params, screen, document
        self.messages: list[dict[str, str]] = []
        self.answers: list[Answer] = []

    def run(self) -> None:
        """Until /quit or the end of the input."""
        if sys.stdin.isatty():
            with suppress(ImportError):  # This gives `input` arrow keys and a history, if Python has them.
                import readline  # noqa: F401
            self.screen.note("Type a message; /help lists the commands.")
        while (line := self._read()) is not None:
            words = line.strip()
            if words in ("/quit", "/exit"):
                return
            if words.startswith("/"):
                self._command(words)
            elif words:
                self._turn(line)

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            self.screen.note("", "/quit or Ctrl-D leaves")
            return ""

    def _command(self, words: str) -> None:
        if words == "/reset":
            self.messages, self.answers = [], []
            self.screen.note("the conversation is forgotten")
        elif words == "/stats":
            self.screen.note(self._stats())
        else:
            if words != "/help":
                self.screen.note(f"there is no command {words}")
            self.screen.note(HELP)

    def _turn(self, line: str) -> None:
        """One message and its answer. A message that does not fit is dropped, and the chat goes on."""
        if self.document and not self.messages:
            line = f"{self.document}\n\n{line}"
        messages = [*self.messages, {"role": "user", "content": line}]
        try:
            answer = self._answer(messages)
        except PromptError as error:
            self.screen.note(f"error: {printable(error)}")
            if self.messages:
                self.screen.note("/reset forgets the conversation and makes room")
            return
        self.answers.append(answer)
        if answer.row.text:
            self.messages = [*messages, {"role": "assistant", "content": answer.row.text}]
        self.screen.note(statistics(answer))
        if answer.row.finish_reason == "context":
            self.screen.note("/reset forgets the conversation and makes room")

    def _answer(self, messages: list[dict[str, str]]) -> Answer:
        from paceline.cli.drive import Interrupt, drive
        from paceline.cli.prompts import Job

        def refuse(job: Job, error: PacelineError) -> None:
            raise error

        job = Job(len(self.answers), messages, self.params)
        with Interrupt() as interrupt:
            watch = lambda engine, job, delta: self.screen.write(delta.pieces)  # noqa: E731
            (answer,) = drive(self.engine, [job], True, interrupt, refuse, watch, self.screen.reading)
        self.screen.end_line()
        return answer

    def _stats(self) -> str:
        """Print statistics over all turns since the beginning or /reset."""
        total = Tally.of(answer.row.stats for answer in self.answers)
        seconds = sum(a.seconds for a in self.answers)
        context = len(self.answers[-1].row) if self.answers else 0
        answers = "answer" if len(self.answers) == 1 else "answers"
        mean, speed = total.mean_accepted_tokens, over(total.new_tokens, seconds)
        return (
            f"{len(self.answers)} {answers}, {total.new_tokens} new tokens in {total.rounds} rounds, {mean:.2f} mean "
            f"accepted tokens, {speed:.1f} tokens/s with the reading of prompts; {context} of "
            f"{self.engine.target.max_context} tokens of context used"
        )
