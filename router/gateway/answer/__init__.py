"""What the client gets: server-sent events, and the continuation of a broken stream."""
