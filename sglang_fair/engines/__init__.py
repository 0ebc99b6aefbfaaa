"""Where the tokens are computed: SGLang on plain PyTorch (`cpu`), and the small models that suit it (`models`)."""
