"""Isolation: what one client's load does to the others, on one stack beside another.

    attacks     who sends what: light clients, running victims, and the client beside them
    measures    from records to the numbers of a row
    live        the stacks on this machine: ours, and stock SGLang behind sglang-router
    command     `sglang-fair bench isolation`

The attacks and the measures are pure: `experiments.beyond_isolation` has them in the simulator.
"""
