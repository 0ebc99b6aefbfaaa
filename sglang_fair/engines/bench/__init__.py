"""`sglang-fair bench scheduler`: what a policy costs inside SGLang's real scheduler.

scheduler     the command: queues to keep, policies to compare, the table
one_process   SGLang's scheduler in this process, with a model that takes no time
"""
