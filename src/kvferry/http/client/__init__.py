"""The client's side: connections to instances, and calls on them."""
