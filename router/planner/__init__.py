"""The planner: a process of its own that orders the queues of a router with placement `qlm`.

answers   pure: from a question to a plan, and to what would do where there is none in time
link      the connection to the router
"""
