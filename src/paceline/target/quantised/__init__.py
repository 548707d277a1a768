"""Models with weights of eight or four bits: made of a checkpoint, or read from a GGUF file."""
