"""Rewards of rows as a run collects them: functions on the host, judges, likelihoods.

The functions and the reward models themselves are in ``jrl.rewards``.
"""
