"""Asking generative models over an OpenAI-compatible API: questions, the client, and what replies mean."""
