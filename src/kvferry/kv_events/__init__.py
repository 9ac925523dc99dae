"""KV events: which blocks an instance's prefix cache has taken in and given up, as vLLM publishes them over ZeroMQ."""
