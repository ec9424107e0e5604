"""Rewards of one paper each: functions for ``[rewards.NAME]``, and combinators."""
