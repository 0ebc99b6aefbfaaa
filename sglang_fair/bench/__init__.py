"""Measurements of this package's own cost, on SGLang's real data structures."""
