"""The HTTP API as types: requests, answers, and how bytes become the one. Servers build on it; it knows no server."""
