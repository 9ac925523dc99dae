"""`kvferry demo`: `command` runs the fleet and prints the results, `requests` sends requests, `stalls` measures and
draws what long prompts do to an answer that is being streamed."""
