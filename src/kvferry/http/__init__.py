"""One HTTP server and one HTTP client, used by the engine's OpenAI server and by the router.

    server      listen · tls · keys · limits · routes · request · response · connection · server
    client      origin · client · pool · client_connection · call · relay

Knows HTTP/1.1 and OpenAI's error format, and nothing of models, instances or tickets. Imports `core` and `observe`
only.
"""
