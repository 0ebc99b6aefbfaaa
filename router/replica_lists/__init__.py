"""Where a router's replicas come from, besides its command line and `POST /workers`: a file, or a DNS name."""
