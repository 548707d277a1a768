"""An OpenAI-compatible server round one engine.

`listener.py` is the HTTP server and its end, `routes.py` has the routes, and `guard.py` stands before them with keys and
bodies. `settings.py` says how much requests may ask for, `fields.py` what they may say, `items.py` the same for
/v1/responses. `chats.py` works a request out and has it answered, for the routes and, without HTTP, for `local.py`.
`tools.py` is what a chat template is given, `reading.py` how the model's answers are read, `responses.py` what goes back,
`structure.py` grammars, `metrics.py` what is noted. The engine runs in the thread of a `workbench.worker`. Knows drafters
by the names that requests give them."""
