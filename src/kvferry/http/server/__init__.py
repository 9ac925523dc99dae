"""The server's side: from a listening socket to a handler, and back."""
