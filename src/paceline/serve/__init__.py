"""An OpenAI-compatible server round one engine.

`listener.py` is the HTTP server and its end, `settings.py` says how much requests may ask for, `guard.py` checks keys
and reads bodies, `fields.py` is what they may say, `app.py` has the routes. `tools.py` is what a chat template is
given, `reading.py` how the model's answers are read, `responses.py` what goes back, `structure.py` grammars,
`metrics.py` what is noted. The engine runs in the thread of a `workbench.worker`. Knows drafters by the names that
requests give them."""
