"""Messages between processes: frames, tickets, and what instances and routers send each other and clients."""
