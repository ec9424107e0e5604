"""Measurements of the library: speed beside other libraries', and beside what the machine allows.

Run from a checkout: ``python -m benchmarks.step --help``. ``benchmarks/README.md`` says what the
figures mean.
"""
