"""What placement `qlm` does with requests and workers, one rule each. The queues are in `router.queues`."""
