"""Serves workers of other stacks over kvferry's own OpenAI server, so that a router sees them as instances."""
