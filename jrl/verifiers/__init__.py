"""Reward functions that run something: programs in the sandbox, queries, proofs.

Entries of ``[rewards]`` by name, through ``jrl.rewards.RUNNING``. They stand above the sandbox of
``jrl.episodes``, and import no JAX, as the pool's worker processes call them.
"""
