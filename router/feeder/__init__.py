"""The feeder: has the requests of batches answered through a gateway, and writes down what comes back.

`core` decides what is leased and sent, and what follows from an answer, `answers` what an answer means. `shell` moves
between the store and the gateway; `intake` accepts the lines of files.
"""
