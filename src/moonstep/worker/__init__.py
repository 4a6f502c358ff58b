"""The worker half: host memory, and the copies between it and the KV blocks of the engine."""
