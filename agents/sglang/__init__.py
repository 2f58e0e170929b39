"""SGLang servers as a `Policy`: client, checked answers, weights over HTTP, and servers that a run starts itself.

Speaks HTTP only: SGLang and its torch live in an environment of their own.
"""
