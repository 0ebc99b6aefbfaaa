"""The version of this package: the one place where it is written. The metadata of the distribution are made from it."""

VERSION = "0.2.0"
