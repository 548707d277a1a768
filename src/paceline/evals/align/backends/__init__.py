"""Where completions come from: an OpenAI-compatible endpoint, or our own engine in this process."""
