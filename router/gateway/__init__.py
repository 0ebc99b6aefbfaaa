"""The HTTP gateway: the OpenAI API and /generate in front, replicas behind, the router asked where to.

`calls` and `sse` are pure; `tokens` turns text into ids; `link` speaks to the router, `relay` to a client,
`placement` to a replica; `resources` is what requests share, `app` the routes, `__main__` the command line.
"""
