"""Measures a replica and fits the cost model with which emulated and simulated replicas keep its time.

    grid      what is measured, and what the measurements say of scheduling: PURE
    measure   measuring an SGLang server over HTTP

We measure batches of requests over a grid of prompt lengths, cached prefixes, batch sizes, contexts and decoding
steps. A batch must begin as one, and its time must not include HTTP. So each batch follows a *plug*: a prompt so
long that the whole batch waits behind it. Between the answers to the plug and to the batch the engine computed the
batch and nothing else, and both answers came the same way.

At the end comes a *crowd*, four times as many short requests as can run at once. The time that it takes beyond the
simulator's, divided by its steps, is time in which requests wait while the scheduler looks for the next one. An
engine that does not schedule ahead spends it in each step under load, and so does the fitted model.
"""
