"""Replay of request traces through Moonstep's own index, with a model of the engine in front.

Imports neither vLLM nor torch.
"""
