"""SGLang as a replica runs it: on a GPU, on a CPU with plain PyTorch (`cpu`), or with an emulated GPU (`emulated`).

With the overlay, the only place that imports SGLang; nothing imports this package.
"""
