"""Replay recorded generations: find the drafted tokens that the target would have accepted, without the target.

`logs.transcript` turns recorded text into tokens, and `replay.walk` replays one answer with one drafter.
`workers` replays all answers on all cores or on a cluster, `report` has the figures and their page, and `tune`
measures costs and predicts speed-ups."""
