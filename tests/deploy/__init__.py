"""What is installed elsewhere: the Helm chart and the Compose file, rendered and read as our own programs read it."""
