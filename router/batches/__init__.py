"""Batches: files of requests that are answered within a window of time, and survive whatever dies.

`model` says what is kept, `contract` what a store promises, `sqlite` and `memory` are stores, `lines` reads and writes
the lines of files, `blobs` keeps the files that were uploaded. Gateways accept files and batches; the feeder
(`router.feeder`) has them answered.
"""
