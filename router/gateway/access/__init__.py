"""Who may ask, in whose name, and how much.

proxies     the networks whose headers count
directory   the tenants' file, read again when it changes
quota       what tenants have used of their limits
identity    from a request's key and headers to its caller
"""
