"""Settings and commands: what can be set, where, by default to what, and how a command line says it."""
