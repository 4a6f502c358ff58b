"""vLLM's edge: the only room that imports vLLM.

Nothing is imported here: vLLM's API process loads this package to find the plugin.
"""
