"""Costs of rows that wait (stands in until they move here)."""

from jrl.serving.row_costs import ChoosePlace, RowCosts, WaitCosts, WaitingPlace, cheapest

__all__ = ["ChoosePlace", "RowCosts", "WaitCosts", "WaitingPlace", "cheapest"]
