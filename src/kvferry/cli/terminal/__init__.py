"""The terminal of a command that serves: `display` shows the start, `live_line` the load, `log_file` has the log."""
