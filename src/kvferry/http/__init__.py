"""The HTTP room: one server and one client, under both the engine's OpenAI server and the router.

    server      listen · tls · keys · limits · routes · request · response · connection · server
    client      origin · client · pool · client_connection · answer

Knows HTTP/1.1, OpenAI's error envelope and nothing of models, instances or tickets. Imports `core` and `observe` only.
"""
