"""The connector audit: any vLLM KV connector against the real scheduler, byte by byte."""
