"""Where the tokens are computed: SGLang on plain PyTorch (`cpu`), and small models for it (`models`)."""
