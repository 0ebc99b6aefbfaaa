"""Fair shares of a service that was given: weighted max-min fairness.

Whoever did not want more than it got keeps that, as far as its weight allows; those who waited divide the rest by their
weights. This is what water does in connected vessels whose widths are the weights and whose heights are what is wanted
(Bertsekas and Gallager, Data Networks, section 6.5.2).
"""

from collections.abc import Mapping


def fair_shares(total: float, wanted: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """How `total` units would be divided. `wanted` is inf for who waited, else what it got. The shares sum to `total`
    if that much is wanted. O(n log n)."""
    order = sorted(wanted, key=lambda name: (wanted[name] / weights.get(name, 1.0), name))
    left, width = total, sum(weights.get(name, 1.0) for name in order)
    shares = dict[str, float]()
    for name in order:
        weight = weights.get(name, 1.0)
        shares[name] = max(0.0, min(wanted[name], left * weight / width)) if width > 0 else 0.0
        left -= shares[name]
        width -= weight
    return shares
