"""The groups of a step: sources for each kind of data, plans, curricula and edits.

``collector.py`` is hops 2 to 4: prompts are chosen, completions drawn and judged, a batch made.
"""
