"""SGLang and what it needs, installed beside this package: `sglang-fair install cpu`, or `cuda`.

SGLang's own requirements name GPU kernels that cannot be installed on a machine without a GPU, so pip cannot resolve
them there. For a CPU the package carries the complete list that is tested, cpu.txt, and pip is told to resolve nothing.
"""
