"""A cluster in virtual time: the router, the placements and the policies of the live one, and modelled engines."""

from workloads.simulation.fleet import Fleet
from workloads.simulation.run import describe, simulate
from workloads.simulation.site import Site

__all__ = ["Fleet", "Site", "describe", "simulate"]
