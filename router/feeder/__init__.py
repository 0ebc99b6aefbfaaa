"""The feeder: has the requests of batches answered through a gateway, and writes down what comes back.

`core` decides what is sent when and what follows from an answer, `answers` what an answer means, `pace` how many are
sent at a time. `shell` moves between the store, the gateway and the router; `intake` accepts the lines of files.
"""
