"""What comparisons of schedulers have in common, and those on live clusters.

`case` says what decides a comparison, whichever engine it runs on, and its cells; `pool` carries out independent ones
in processes; `live` makes those of clusters (simulated ones are in `simulation.comparison`); `comparison` turns the
runs' measures into tables, plots and a line of JSON; `options` are the commands' common ones.
"""
