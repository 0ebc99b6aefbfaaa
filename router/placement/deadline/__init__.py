"""Placement `deadline`: one rule for who goes next, and which model a replica loads. The rule is in `rule`."""
