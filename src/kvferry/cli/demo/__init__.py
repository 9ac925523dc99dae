"""`kvferry demo`: `command` runs the fleet and tells the story, `requests` asks, `stalls` measures and draws what long
prompts do to an answer that is being streamed."""
