"""The agent beside a replica: it has the replica load another model when the router says so."""
