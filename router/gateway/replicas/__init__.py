"""The replicas: connections, health, flow control, and one attempt at serving a request."""
