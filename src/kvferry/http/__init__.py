"""One HTTP server and one HTTP client, used by the engine's OpenAI server and by the router.

    server    from a listening socket to a handler, and back
    client    connections to instances, and calls on them
    relay     from a call to a response
    message, headers, tls, errors     for both

Knows HTTP/1.1 and OpenAI's error format, and nothing of models, instances or tickets. Imports `core` and `observe`
only.
"""
