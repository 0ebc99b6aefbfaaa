"""One replica in virtual time: how long a step takes, and what an engine makes of it. No engine, no clock."""
