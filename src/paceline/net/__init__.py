"""Servers that are asked: the HTTP client, endpoints, what servers say of themselves, and keys."""
