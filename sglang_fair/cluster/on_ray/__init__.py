"""Replicas on the nodes of a Ray cluster: `sglang-fair cluster --ray ADDRESS`.

The supervisor starts one process more, the fleet, which is Ray's driver. It asks for a placement group with a bundle
for each replica, and has an actor in each, which runs our replica process on its node. Ray restarts the actors. The
fleet lists the replicas that are ready in a file, which the router follows.

    told     what the fleet is told, and what Ray is asked for. Pure
    states   what has become of each replica, and what follows. Pure
    host     the actor's body: one replica and its process. Knows nothing of Ray
    fleet    follows the actors, lists replicas, adds and drains them
    driver   what is asked of Ray: the only module that imports it
"""
