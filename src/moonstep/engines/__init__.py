"""Inference engines Moonstep works in, each behind a room of its own."""
