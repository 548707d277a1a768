"""An OpenAI-compatible server round one engine.

`app.py` has the routes, `fields.py` what a request may say, `worker.py` the thread in which the engine runs,
`tools.py` how a model learns of tools, `reading.py` how its answers are read, `answers.py` what goes back,
`structure.py` grammars. Knows drafters by the names that requests give them.
"""
