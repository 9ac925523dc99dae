"""Cores and memory that a process may use on this machine, within the limits of its container."""
