"""What the commands have in common: a comparison with its folder (`comparison`), jobs in processes (`pool`), and
commands whose options are a dataclass (`options`)."""
