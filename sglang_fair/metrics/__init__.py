"""What Prometheus is told: the table of metrics, panels and alerts, and which client has a label of its own."""
