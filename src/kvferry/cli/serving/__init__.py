"""Commands that serve: instances, routers, and both together, in the foreground."""
