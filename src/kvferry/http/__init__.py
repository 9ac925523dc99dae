"""One HTTP server and one HTTP client, used by the engine's OpenAI server and by the router.

    both        message · headers · tls · errors
    server      listen · door · keys · limits · routes · request · body · response · writer · connection · service ·
                server
    client      origin · client · pool · client_connection · call · signed_client
    from one to the other   relay

Knows HTTP/1.1 and OpenAI's error format, and nothing of models, instances or tickets. Imports `core` and `observe`
only.
"""
