"""The HTTP gateway: clients speak the OpenAI API or /generate, the router says which replica serves each request.

    app, pages, admin      what the gateway answers itself, each an operation (operations, openapi)
    listener, address      connections of clients, and where they come to
    relay, serving, attempt    one request from arrival to its outcome
    explain, tracing       what is known of a request afterwards, as an answer and as spans
    replicas/              connections to replicas, their health, one attempt at serving a request
    answer/                server-sent events, and the continuation of a broken stream
    routing/               the connections to routers, and what replaces them while they are away
    request/               the checked body and its tokens
    access/                who may ask, and in whose name
    sharing                how clients share what the gateway has

Each imports only those below it.
"""
