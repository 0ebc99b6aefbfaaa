"""An endpoint picker of the Gateway API Inference Extension: gateways of other makers ask it, by Envoy's ext_proc,
where each request goes (docs/proposals/004-endpoint-picker-protocol of that project, v1.0.0).

    server       the gRPC service, its certificate and its health
    request      one HTTP request: the messages about it, as the gateway's relay sees a request
    endpoints    the replicas' addresses, as gateways write them

Who may ask, limits, parsing, placement and charges are the gateway's (`router.gateway`), whose relay serves each
request; only the way to the replica and back is the other gateway's. So the router is asked over its wire, by the
gateway's client of it, and not run in here: several pickers and gateways then share one tree and one set of credits,
a picker that ends forgets nothing, and all that the gateway does while routers are away holds here too.
"""
