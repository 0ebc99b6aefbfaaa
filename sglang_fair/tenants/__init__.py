"""The tenants' file: who may ask, with which keys, for how much.

keys       making a key, and its digest
model      what a file may say: one pydantic model
file       reading one; a mistake is an error with line and column
edit       adding, rotating and removing, which leaves comments where they are
__main__   `sglang-fair tenants`
"""
