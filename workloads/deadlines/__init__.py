"""Requests with deadlines for several models, on the simulated cluster: the experiments of QLM (SoCC 2024).

traffic     who asks for what, by when
run         one run of them, and what of it was in time
"""
