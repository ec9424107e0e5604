"""Rewards of one paper or one other library each: functions for ``[rewards.NAME]``, combinators."""
