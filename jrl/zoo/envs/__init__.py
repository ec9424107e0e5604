"""Particular environments, named in configurations as module:function."""
