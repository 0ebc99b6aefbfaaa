"""One replica that lists itself in a file which routers follow: what a task of a batch system runs."""
