"""The cost model: how long a forward takes, measured on this machine, and what a method would gain."""
