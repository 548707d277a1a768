"""Draft heads that fill a tree of fixed shape: their networks, and how they draft."""
