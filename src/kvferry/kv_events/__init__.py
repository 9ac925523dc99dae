"""KV events: which blocks an instance's prefix cache has stored and evicted, as vLLM publishes them over ZeroMQ."""
