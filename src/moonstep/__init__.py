"""Moonstep keeps the KV cache of an LLM server, in step with the server's scheduler."""

__version__ = "0.1.0"
