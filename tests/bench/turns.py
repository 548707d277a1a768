"""Answers of one turn, made by hand."""

from paceline.net.completion import Completion


def reply(prompt_tokens, tokens, text, seconds, lengths=None, times=None, nodes=None, depths=None, *, finish="stop",
          count=0, **more):  # fmt: skip
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
    return Completion(
        text, finish_reason=finish, tokens=tokens, usage=usage, seconds=seconds, lengths=lengths, times=times or [],
        nodes=nodes, depths=depths, **more,
    )  # fmt: skip
