"""A run's parts, read from its configuration: data, rewards, method, shapes, meshes.

What scores rows (``jrl.judging``), draws groups (``jrl.collect``) and trains (``jrl.train``) reads
the ``Run`` of ``run.py``, which ``jrl.train.build`` makes.
"""
