"""A server of OpenAI's and Anthropic's APIs round one engine.

`listener.py` is the HTTP server and its end, `routes.py` has the routes, and `guard.py` stands before them with keys
and bodies. `settings.py` says how much requests may ask for, `fields.py` what chats and texts may say. `items.py` is
/v1/responses, `messages.py` /v1/messages, `ollama.py` /api/chat: each reads a request as a chat, and writes the answer
in its own form.
`responses.py` writes chats and texts, and `streams.py` has what all streams share. `prepare.py` works a request out,
and `chats.py` has it answered, for the routes and, without HTTP, for `local.py`. `tools.py` prepares the variables of a
chat template, `reading.py` reads the model's answers, `structure.py` makes grammars, and `metrics.py` counts and logs
requests. The engine runs in the thread of a `worker`. Requests choose drafters by name; the package knows no drafter.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # Its modules come from several distributions.
