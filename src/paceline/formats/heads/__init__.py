"""Published heads: each module reads a format, and gives its tensors and options our names."""
