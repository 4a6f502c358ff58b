"""The scheduler half: lives and their tables, the host-cache index, what is promised and planned.

Runs in the engine's scheduler process, on its thread alone. Imports neither torch nor vLLM.
"""
