"""The terminal of a command that serves: `display` shows the start and writes the log, `live_line` shows the load."""
