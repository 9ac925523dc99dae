"""The engine's OpenAI-compatible HTTP server."""
