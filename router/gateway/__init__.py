"""The HTTP gateway: clients speak the OpenAI API or /generate, the router says which replica serves each request.

    app, admin, listener   HTTP routes and connections of clients
    relay                  one request from arrival to its outcome
    explain, spans         what is known of a request afterwards, told and as spans (tracing)
    replicas/              connections to replicas, their health, one attempt at serving a request
    answer/                server-sent events, and the continuation of a broken stream
    routing/               the connection to the router, and what replaces it while it is away
    request/               the checked body and its tokens
    access/                who may ask, and in whose name
    sharing/               how clients share what the gateway has

Each imports only those below it.
"""
