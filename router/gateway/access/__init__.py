"""Who may ask, in whose name, and how much."""
