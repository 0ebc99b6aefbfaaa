"""Which replica: the connection to the router, and what the gateway does while no router answers."""
