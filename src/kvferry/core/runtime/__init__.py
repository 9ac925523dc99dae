"""Tasks, event loops and threads of a process, its standard streams, and its end."""
