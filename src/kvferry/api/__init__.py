"""The HTTP API as types: requests, answers, and how bytes become requests. Servers build on it; it knows no server."""
