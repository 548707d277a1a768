"""Options for the API keys of servers that a command asks."""

import shlex
from dataclasses import dataclass
from typing import ClassVar

from paceline.draft.spec import option


@dataclass(frozen=True)
class Keys:
    """Options for the API key sent to servers, shared by every command that asks servers."""

    GROUP: ClassVar = "API keys"

    api_key_env: str | None = option(
        None, "Environment variable that holds the API key of the servers that are asked. [default: OPENAI_API_KEY, "
        "for https://api.openai.com alone]",
    )
    api_key_file: str | None = option(
        None, "File with the API key of the servers that are asked, on one line.", metavar="FILE"
    )
    key_over_http: bool = option(
        False, "Allow sending the API key to another machine over plain http, where others can read it.",
        names=("--key-over-http",),
    )

    def of(self, spec: str) -> str | None:
        """The key for the servers of "URL[,URL...][#model]"; None if they get none. Raises PacelineError."""
        from paceline.net.client import api_key

        return api_key(spec, self.api_key_env, self.api_key_file, over_http=self.key_over_http)

    @property
    def words(self) -> str:
        """The given options as words of a command line, to print."""
        given = {"--api-key-env": self.api_key_env, "--api-key-file": self.api_key_file}
        flags = "".join(f" {name} {shlex.quote(value)}" for name, value in given.items() if value)
        return flags + " --key-over-http" * self.key_over_http


def check_server(spec: str, keys: Keys) -> None:
    """Raise PacelineError unless "URL[,URL...][#model]" has addresses, and their key can be read and sent."""
    from paceline.net.client import parse
    from paceline.net.endpoint import check_addresses

    check_addresses(parse(spec)[0])
    keys.of(spec)
