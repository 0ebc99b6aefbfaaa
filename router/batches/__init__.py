"""Batches: files of requests that are answered within a window of time, and survive whatever dies.

`model` says what is kept, `store` keeps it, `lines` reads and writes the lines of files, `blobs` keeps the files that
were uploaded. Gateways accept files and batches; feeders (`router.feeder`) have them answered.
"""
