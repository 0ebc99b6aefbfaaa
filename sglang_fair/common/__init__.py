"""What the core, the router and the workloads share and none of them owns. Imports nothing of the project."""
