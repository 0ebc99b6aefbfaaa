"""Requests with deadlines for several models, on a simulated cluster: the experiments of QLM (SoCC 2024).

traffic     who asks for what, by when
fleet       workers, the models that each can load, and how long that takes
cluster     one run in virtual time: a placement that holds requests, replicas
baselines   what a placement with queues of groups is compared with
measures    what of it was in time
"""
