"""Targets: the model whose output must not change, behind one interface (`paceline.target.base.Target`)."""
