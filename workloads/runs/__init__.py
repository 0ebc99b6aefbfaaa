"""Runs: what a comparison is made of, where its records lie, the processes that carry runs out, and the tables.

`case` says what decides a comparison, whichever engine it runs on, and which runs it consists of; `pool` carries out
independent runs in processes; `present` turns the runs' measures into tables, plots and a line of JSON.
"""
