"""How clients share what the gateway has: round-robin turns and a thread pool."""
