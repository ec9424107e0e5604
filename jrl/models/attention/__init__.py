"""Attention within rows and to caches, by a kernel of ``choice``.

The kernels are ``dense`` (plain JAX), ``blockwise``, ``cudnn``, and for TPUs ``splash``,
``splash_cache`` and ``cache_read``; ``flash`` merges what several of them saw, and ``cache_write``
writes a cache on TPUs.
"""
