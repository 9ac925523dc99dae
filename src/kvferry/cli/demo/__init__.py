"""`kvferry demo`: `command` runs the fleet and prints the results, `requests` sends requests, `token_gaps` measures and
draws how long prompts delay an answer that is being streamed."""
