"""`/v1/files` and `/v1/batches`, as OpenAI has them: `schema` are the types, `upload` takes a file in, `routes` are
what clients ask. What is kept, and how, is `router.batches`; batches are answered by `router.feeder`.
"""
