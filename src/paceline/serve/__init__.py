"""An OpenAI-compatible server round one engine.

`connections.py` closes slow connections, `guard.py` checks keys, `body.py` reads requests, `limits.py` says how much
they may ask for and `fields.py` what they may say. `app.py` has the routes, `worker.py` the thread in which the engine
runs, `ending.py` how the server ends. `tools.py` says how a model learns of tools, `reading.py` how its answers are
read, `answers.py` what goes back, `structure.py` grammars. Knows drafters by the names that requests give them.
"""
