"""Targets: the model whose output must not change, under one interface (`base.Target`)."""
