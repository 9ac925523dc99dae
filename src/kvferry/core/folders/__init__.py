"""Folders of kvferry's own on this machine: caches, state, and those that only their user can read."""
