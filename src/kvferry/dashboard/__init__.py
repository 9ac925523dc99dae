"""The page that a router or an instance serves at `/`: the fleet, the last requests, and a chat."""
