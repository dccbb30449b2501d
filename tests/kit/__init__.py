"""What the tests share, by idea; a test imports `tests.kit.…` and nothing of another test.

`servers`, `proxies` and `workers` are other ends of a connection: on this loop, or processes of
their own. A module that is named after a system is what that system's tests share.
"""
