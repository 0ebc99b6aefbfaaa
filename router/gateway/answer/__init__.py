"""What the client gets: server-sent events, the continuation of a broken stream, sending with a time limit."""
