"""Report pages and their plots."""
