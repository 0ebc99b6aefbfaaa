"""Replicas, router and gateway as one thing that starts, is watched, and stops: `sglang-fair cluster`.

`options` says what is wanted, `machine` and `model` what there is; `plan` turns both into the processes
to run, purely; `supervisor` runs a plan and knows nothing of SGLang.
"""
