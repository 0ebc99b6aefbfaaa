"""`/v1/files` and `/v1/batches`, as OpenAI has them: `schema` are the types, `upload` takes a file in, `files` and
`routes` are what clients ask. What is kept, and how, is `router.batches`; who answers a batch is `router.feeder`.
"""
