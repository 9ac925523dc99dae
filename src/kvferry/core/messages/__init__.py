"""What travels between processes: frames, tickets, and what instances and routers tell each other and clients."""
