"""What the commands have in common: a comparison with its folder, and jobs in processes."""
