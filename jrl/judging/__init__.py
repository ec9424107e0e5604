"""What scores rows while a run collects them: judges, reward functions on the host, likelihoods.

The functions themselves, and the models that give points, are in ``jrl.rewards``.
"""
