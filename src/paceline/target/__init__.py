"""Targets: models whose output must not change, under the interface `base.Target`."""
