"""Shares of clients in queues of requests with deadlines: who is within its share, and who is ahead of it. Pure."""
