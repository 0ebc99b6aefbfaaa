"""Isolation: what one client's load does to the others, on one stack beside another.

    attacks     who sends what: light clients, running victims, and the client beside them
    measures    from records to the numbers of a row
    command     `sglang-fair bench isolation`: the stacks on this machine

The attacks and the measures are pure: `experiments.beyond_isolation` has them in the simulator.
"""
