"""Recorded generations, replayed: what a drafter would have had accepted, without the model that wrote them.

`workbench.transcript` turns recorded text into tokens, and `workbench.walk` replays one answer with one drafter.
`workers` replays all of them on all cores or on a cluster, `report` has the figures, and `tune` predicts a speed-up."""
